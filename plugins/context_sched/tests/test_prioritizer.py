from __future__ import annotations

import random
from itertools import pairwise
from types import SimpleNamespace

import hypothesis.strategies as st
import msgspec
import pytest
import seer_context_sched
from hypothesis import given, settings
from seer_context_sched import ContextAware, Settings

from seer_core.testing import RolloutByHand

MAX_TOKENS = 50


class Reference:
    """The paper's Algorithm 2 with its safeguard, by looking at everything each time."""

    def __init__(self, guard_interval):
        self.guard_interval = guard_interval
        self.waiting = []
        self.served = {}
        self.decisions = 0

    def push(self, request):
        self.waiting.append(request)

    def peek(self):
        probes = [request for request in self.waiting if request.index == 0]
        others = [request for request in self.waiting if request.index > 0]
        guard = self.guard_interval and (self.decisions + 1) % self.guard_interval == 0
        if guard and others:
            group = min({request.group for request in others}, key=self.least_served)
        elif probes:
            return min(probes, key=lambda request: (request.generated_tokens, request.seq))
        elif others:
            group = min({request.group for request in others}, key=self.longest)
        else:
            return None
        mates = [request for request in others if request.group is group]
        return min(mates, key=lambda request: (-request.generated_tokens, request.seq))

    def least_served(self, group):
        return self.served.get(group.seq, 0), group.seq

    def longest(self, group):
        return -group.estimate_tokens, group.seq

    def take(self, request):
        self.waiting.remove(request)
        self.decisions += 1
        if request.index > 0:
            self.served[request.group.seq] = self.served.get(request.group.seq, 0) + 1

    def group_changed(self, group, request):
        """Everything is looked up when needed."""

    def __len__(self):
        return len(self.waiting)


def rollout_of(*queues):
    return RolloutByHand(*queues, max_tokens=MAX_TOKENS)


def test_probes_come_first_one_per_group_in_order_of_arrival():
    rollout = rollout_of(ContextAware(0))
    for _ in range(3):
        rollout.add(2)
    assert [rollout.serve().id for _ in range(6)] == ["g0/0", "g1/0", "g2/0", "g0/1", "g1/1", "g2/1"]


def test_among_probes_the_one_with_the_fewest_tokens_is_next():
    rollout = rollout_of(ContextAware(0))
    for _ in range(3):
        rollout.add(1)
    first, second, third = (rollout.serve() for _ in range(3))
    for request, tokens in ((first, 30), (second, 10), (third, 20)):
        rollout.come_back(request, tokens)
    assert [rollout.serve() for _ in range(3)] == [second, third, first]


def test_a_probe_between_chunks_goes_before_everything_else():
    rollout = rollout_of(ContextAware(0))
    rollout.add(3)
    probe = rollout.serve()
    rollout.serve()
    rollout.come_back(probe, 40)
    assert rollout.serve() is probe


def test_without_probes_the_group_with_the_largest_estimate_is_next():
    rollout = rollout_of(ContextAware(0))
    for _ in range(3):
        rollout.add(2)
    probes = [rollout.serve() for _ in range(3)]
    for probe, tokens in zip(probes, (10, 30, 20), strict=True):
        rollout.end(probe, tokens)
    assert [rollout.serve().group.id for _ in range(3)] == ["g1", "g2", "g0"]


def test_a_group_that_has_taught_nothing_counts_as_long():
    rollout = rollout_of(ContextAware(0))
    rollout.add(2)
    rollout.add(2)
    rollout.end(rollout.serve(), MAX_TOKENS - 1)
    rollout.serve()
    assert rollout.serve().group.id == "g1"


def test_an_estimate_that_grows_moves_its_group_up():
    rollout = rollout_of(ContextAware(0))
    for _ in range(2):
        rollout.add(3)
    for probe in [rollout.serve() for _ in range(2)]:
        rollout.end(probe, 10 if probe.group.seq else 20)
    other = next(request for request in rollout.waiting if request.id == "g1/1")
    rollout.take(other)
    rollout.running.append(other)
    rollout.end(other, 30)
    assert rollout.serve().id == "g1/2"


def test_within_a_group_the_furthest_request_is_next():
    rollout = rollout_of(ContextAware(0))
    rollout.add(4)
    rollout.serve()
    first, second = rollout.serve(), rollout.serve()
    rollout.come_back(first, 5)
    rollout.come_back(second, 9)
    assert [rollout.serve().id for _ in range(3)] == [second.id, first.id, "g0/3"]


def test_every_guard_interval_th_decision_serves_the_least_served_group():
    rollout = rollout_of(ContextAware(3))
    long, _ = rollout.add(20), rollout.add(20)
    for probe in (rollout.serve(), rollout.serve()):
        rollout.end(probe, 40 if probe.group is long else 1)
    served = [rollout.serve().group.id for _ in range(10)]
    assert served == ["g0", "g0", "g0", "g1", "g0", "g0", "g1", "g0", "g0", "g1"]


def test_guard_interval_0_never_serves_the_short():
    rollout = rollout_of(ContextAware(0))
    long, _ = rollout.add(30), rollout.add(30)
    for probe in (rollout.serve(), rollout.serve()):
        rollout.end(probe, 40 if probe.group is long else 1)
    assert {rollout.serve().group.id for _ in range(29)} == {"g0"}


@pytest.mark.parametrize("interval", [1, 2, 5])
def test_the_guard_starves_no_group_however_wrong_the_estimates(interval):
    rollout = rollout_of(ContextAware(interval))
    groups = 10
    for _ in range(groups):
        rollout.add(3)
    for probe in [request for request in rollout.waiting if request.index == 0]:
        rollout.take(probe)
        rollout.running.append(probe)
        rollout.end(probe, MAX_TOKENS - probe.group.seq)
    last_served = dict.fromkeys(range(groups), 0)
    for decision in range(1, 40 * groups * interval):
        request = rollout.serve()
        last_served[request.group.seq] = decision
        rollout.come_back(request, 0)
        assert decision - min(last_served.values()) <= 2 * groups * interval


@settings(max_examples=150, deadline=None)
@given(interval=st.sampled_from([0, 1, 2, 3, 7]), data=st.data())
def test_decisions_equal_those_of_algorithm_2(interval, data):
    rollout = rollout_of(ContextAware(interval), Reference(interval))
    for _ in range(data.draw(st.integers(5, 60))):
        steps = ["add", "serve", "serve", "peek"]
        if rollout.running:
            steps += ["come back", "come back", "give back", "end", "end", "abort running"]
        if rollout.waiting:
            steps.append("abort waiting")
        step = data.draw(st.sampled_from(steps))
        if step == "add":
            rollout.add(data.draw(st.integers(1, 4)), data.draw(st.sampled_from([5, 20, MAX_TOKENS])))
        elif step == "serve":
            rollout.serve()
        elif step == "peek":
            assert len({queue.peek() for queue in rollout.queues}) == 1
        elif step == "abort waiting":
            rollout.abort(data.draw(st.sampled_from(rollout.waiting)))
        else:
            request = data.draw(st.sampled_from(rollout.running))
            if step == "come back":
                rollout.come_back(request, data.draw(st.integers(1, 9)))
            elif step == "give back":
                rollout.come_back(request, 0)
            elif step == "end":
                rollout.end(request, data.draw(st.integers(0, 9)))
            else:
                rollout.abort(request)
        assert {len(queue) for queue in rollout.queues} == {len(rollout.waiting)}
    while rollout.serve() is not None:
        pass
    assert rollout.waiting == []


def entries(queue):
    """Count what the heaps hold, stale or not."""
    candidates = sum(len(group.heap) for group in queue._groups.values())
    return len(queue._probes) + len(queue._longest) + len(queue._least_served) + candidates


@pytest.mark.parametrize("interval", [0, 2, 32])
def test_memory_stays_bounded_over_many_chunks(interval):
    rollout = rollout_of(ContextAware(interval))
    for _ in range(20):
        rollout.add(5)
    for probe in [rollout.serve() for _ in range(20)]:
        rollout.end(probe, probe.group.seq)
    for _ in range(5000):
        rollout.come_back(rollout.serve(), 1)
    assert entries(rollout.queues[0]) <= 2 * rollout.requests


@pytest.mark.parametrize("interval", [0, 2, 32])
def test_memory_stays_bounded_over_many_groups(interval):
    rng = random.Random(0)
    rollout = rollout_of(ContextAware(interval))
    sizes = []
    for step in range(1200):
        while len(rollout.waiting) < 60:
            rollout.add(4)
        request = rollout.serve()
        fate = rng.random()
        if fate < 0.5:
            rollout.end(request, rng.randrange(40))
        elif fate < 0.9:
            rollout.come_back(request, 1)
        else:
            rollout.running.remove(request)
            rollout.push(request)
            rollout.abort(request)
        if step > 200:
            sizes.append(entries(rollout.queues[0]))
    assert max(sizes) <= 3 * 64 + 6 * 64


def test_nothing_is_kept_of_groups_that_are_over():
    rollout = rollout_of(ContextAware(4))
    for _ in range(200):
        rollout.add(3)
    while (request := rollout.serve()) is not None:
        rollout.end(request, 5)
    assert rollout.queues[0]._groups == {}
    assert entries(rollout.queues[0]) <= 3 * 64


def test_equal_estimates_go_by_arrival():
    rollout = rollout_of(ContextAware(0))
    for _ in range(4):
        rollout.add(2)
    for probe in [rollout.serve() for _ in range(4)]:
        rollout.end(probe, 7)
    order = [rollout.serve().group.seq for _ in range(4)]
    assert all(before < after for before, after in pairwise(order))


def test_the_hook_passes_its_setting_on():
    queue = seer_context_sched.seer_make_prioritizer(Settings(guard_interval=7), SimpleNamespace())
    assert queue.guard_interval == 7


def test_a_negative_interval_is_no_setting():
    with pytest.raises(msgspec.ValidationError, match="guard_interval"):
        msgspec.convert({"guard_interval": -1}, Settings)
