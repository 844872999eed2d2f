from __future__ import annotations

import random
from itertools import pairwise

import hypothesis.strategies as st
from hypothesis import given, settings
from seer_context_sched import ContextAware
from seer_testing import QueueHarness

from seer_core.model import GroupContext, InstanceInfo, Request, RequestState
from seer_core.model.events import ChunkFinished, Dispatch, GroupSpec, GroupsSubmitted, InstanceStarted
from seer_core.scheduling.scheduler import Policies, Scheduler, Slot

MAX_TOKENS = 50


class Reference:
    """The paper's Algorithm 2, by looking at everything each time."""

    def __init__(self):
        self.waiting = []

    def push(self, request):
        self.waiting.append(request)

    def peek(self):
        probes = [request for request in self.waiting if request.probe]
        others = [request for request in self.waiting if not request.probe]
        if probes:
            return min(probes, key=lambda request: (request.generated_tokens, request.seq))
        if not others:
            return None
        group = min({request.group for request in others}, key=self.longest)
        mates = [request for request in others if request.group is group]
        return min(mates, key=lambda request: (-request.generated_tokens, request.seq))

    def longest(self, group):
        return -group.estimate_tokens, group.seq

    def take(self, request):
        self.waiting.remove(request)

    def group_changed(self, group, request):
        """Everything is looked up when needed."""

    def __len__(self):
        return len(self.waiting)


def rollout_of(*queues):
    return QueueHarness(*queues, max_tokens=MAX_TOKENS)


def test_probes_come_first_one_per_group_in_order_of_arrival():
    rollout = rollout_of(ContextAware())
    for _ in range(3):
        rollout.add(2)
    assert [rollout.serve().id for _ in range(6)] == ["g0/0", "g1/0", "g2/0", "g0/1", "g1/1", "g2/1"]


def test_among_probes_the_one_with_the_fewest_tokens_is_next():
    rollout = rollout_of(ContextAware())
    for _ in range(3):
        rollout.add(1)
    first, second, third = (rollout.serve() for _ in range(3))
    for request, tokens in ((first, 30), (second, 10), (third, 20)):
        rollout.come_back(request, tokens)
    assert [rollout.serve() for _ in range(3)] == [second, third, first]


def test_a_group_whose_family_has_shown_lengths_needs_no_probe():
    queue = ContextAware()

    def wait(seq, longest, tokens=0):
        group = GroupContext(f"g{seq}", seq, 1, 5, MAX_TOKENS, left=1, first_seq=seq)
        if longest:
            group.informed, group.finished, group.longest_finished_tokens = True, 1, longest
        queue.push(request := Request(group, 0, generated_tokens=tokens))
        return request

    def serve():
        queue.take(request := queue.peek())
        request.state = RequestState.RUNNING
        return request

    short, long, unknown = wait(0, 10), wait(1, 40), wait(2, 0)
    assert [serve() for _ in range(3)] == [unknown, long, short]
    long.generated_tokens, long.state = 20, RequestState.WAITING
    queue.push(long)
    assert (serve(), queue.peek(), len(queue)) == (long, None, 0)


def test_a_probe_between_chunks_goes_before_everything_else():
    rollout = rollout_of(ContextAware())
    rollout.add(3)
    probe = rollout.serve()
    rollout.serve()
    rollout.come_back(probe, 40)
    assert rollout.serve() is probe


def test_without_probes_the_group_with_the_largest_estimate_is_next():
    rollout = rollout_of(ContextAware())
    for _ in range(3):
        rollout.add(2)
    probes = [rollout.serve() for _ in range(3)]
    for probe, tokens in zip(probes, (10, 30, 20), strict=True):
        rollout.end(probe, tokens)
    assert [rollout.serve().group.id for _ in range(3)] == ["g1", "g2", "g0"]


def test_a_group_without_a_finished_response_counts_as_long():
    rollout = rollout_of(ContextAware())
    rollout.add(2)
    rollout.add(2)
    rollout.end(rollout.serve(), MAX_TOKENS - 1)
    rollout.serve()
    assert rollout.serve().group.id == "g1"


def test_an_estimate_that_grows_moves_its_group_up():
    rollout = rollout_of(ContextAware())
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
    rollout = rollout_of(ContextAware())
    rollout.add(4)
    rollout.serve()
    first, second = rollout.serve(), rollout.serve()
    rollout.come_back(first, 5)
    rollout.come_back(second, 9)
    assert [rollout.serve().id for _ in range(3)] == [second.id, first.id, "g0/3"]


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_decisions_equal_those_of_algorithm_2(data):
    rollout_of(ContextAware(), Reference()).play(data)


def entries(queue):
    """Count what the heaps and lines hold, stale or not."""
    candidates = sum(len(group.begun or ()) + len(group.fresh) for group in queue._groups.values())
    return len(queue._begun_probes) + len(queue._fresh_probes) + len(queue._longest) + candidates


def test_memory_stays_bounded_over_many_chunks():
    rollout = rollout_of(ContextAware())
    for _ in range(20):
        rollout.add(5)
    for probe in [rollout.serve() for _ in range(20)]:
        rollout.end(probe, probe.group.seq)
    for _ in range(5000):
        rollout.come_back(rollout.serve(), 1)
    assert entries(rollout.queues[0]) <= 2 * rollout.requests


def test_memory_stays_bounded_over_many_groups():
    rng = random.Random(0)
    rollout = rollout_of(ContextAware())
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
    rollout = rollout_of(ContextAware())
    for _ in range(200):
        rollout.add(3)
    while (request := rollout.serve()) is not None:
        rollout.end(request, 5)
    assert rollout.queues[0]._groups == {}
    assert entries(rollout.queues[0]) <= 3 * 64


def test_equal_estimates_go_by_arrival():
    rollout = rollout_of(ContextAware())
    for _ in range(4):
        rollout.add(2)
    for probe in [rollout.serve() for _ in range(4)]:
        rollout.end(probe, 7)
    order = [rollout.serve().group.seq for _ in range(4)]
    assert all(before < after for before, after in pairwise(order))


def test_a_response_moves_all_groups_of_its_family_to_their_new_estimate():
    queue = ContextAware()
    scheduler = Scheduler(Policies(prioritizer=Slot("prioritizer", "context_sched", queue)))
    scheduler.handle(InstanceStarted(InstanceInfo("x", 1 << 20, 16, 4, 4096)), 0.0)
    scheduler.handle(GroupsSubmitted(tuple(GroupSpec(name, 10, 2, 100, family="f") for name in "ab")), 0.0)
    scheduler.handle(GroupsSubmitted((GroupSpec("c", 10, 3, 60), GroupSpec("d", 10, 3, 99, family="f"))), 0.0)
    sent = [request.id for request in scheduler.buffer.on_instance["x"]]
    assert sent == ["a/0", "b/0", "a/1", "b/1"]

    def finished(request_id, tokens):
        commands = scheduler.handle(ChunkFinished(request_id, "x", tokens, stopped=True), 1.0)
        return [each.request_id for each in commands if isinstance(each, Dispatch)]

    assert finished("a/0", 20) == ["c/0"]
    assert finished("a/1", 10) == ["d/0"]
    assert finished("b/0", 30) == ["c/1"]  # 60 tokens are more than the 30 of the family
    assert finished("b/1", 90) == ["d/1"]  # and 90 are more than 60


def test_nothing_is_kept_of_a_family_whose_groups_are_over():
    queue = ContextAware()
    rollout = rollout_of(queue)
    for _ in range(3):
        rollout.add(3, family="f")
    rollout.drain()
    assert not queue._families
