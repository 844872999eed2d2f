from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import hypothesis.strategies as st
import msgspec
import pytest
import seer_length_posterior
from hypothesis import given, settings
from seer_length_posterior import LongestPlausible, Settings, plausible_tokens

from seer_core.config import make_config
from seer_core.model import GroupContext, Request, RequestState
from seer_core.policy import Prioritizer
from seer_core.runtime import rollout

MAX_TOKENS = 50


class Reference:
    """The same order, by looking at everything each time."""

    def __init__(self, surprise, guard_interval, turn_tokens):
        self.surprise = surprise
        self.guard_interval = guard_interval
        self.turn_tokens = turn_tokens
        self.waiting = []
        self.seen = {}
        self.decisions = 0

    def push(self, request):
        self.waiting.append(request)
        self.seen.setdefault(request.group, set()).add(request)

    def peek(self):
        if not self.waiting:
            return None
        if self.guard_interval and (self.decisions + 1) % self.guard_interval == 0:
            return self.waiting[0]
        return min(self.waiting, key=self.rank)

    def rank(self, request):
        group = request.group
        tokens = sum(mate.generated_tokens for mate in self.seen[group])
        plausible = min(group.max_tokens, plausible_tokens(group.finished, tokens, self.surprise))
        before = request.generated_tokens // self.turn_tokens * self.turn_tokens
        return before - plausible, group.seq, -request.generated_tokens, request.seq

    def take(self, request):
        self.waiting.remove(request)
        self.decisions += 1

    def group_changed(self, group):
        """Everything is looked up when needed."""

    def __len__(self):
        return len(self.waiting)


class Rollout:
    """Groups whose requests wait, run and finish; tells one prioritizer, or two that must agree."""

    def __init__(self, *queues):
        self.queues = queues
        self.groups = 0
        self.requests = 0
        self.running = []
        self.waiting = []

    def add(self, size, max_tokens=MAX_TOKENS):
        group = GroupContext(f"g{self.groups}", self.groups, size, 10, max_tokens, left=size)
        self.groups += 1
        for index in range(size):
            self.push(Request(f"{group.id}/{index}", self.requests, index, group))
            self.requests += 1
        return group

    def push(self, request):
        request.state = RequestState.WAITING
        self.waiting.append(request)
        for queue in self.queues:
            queue.push(request)

    def take(self, request):
        self.waiting.remove(request)
        for queue in self.queues:
            queue.take(request)

    def serve(self):
        """Take what is next and return it."""
        offers = [queue.peek() for queue in self.queues]
        assert len(set(offers)) == 1
        if offers[0] is not None:
            self.take(offers[0])
            offers[0].state = RequestState.RUNNING
            self.running.append(offers[0])
        return offers[0]

    def come_back(self, request, tokens):
        self.running.remove(request)
        request.generated_tokens += tokens
        self.push(request)

    def finish(self, request, learn=True):
        request.state = RequestState.FINISHED
        request.group.finished += learn
        request.group.left -= 1
        for queue in self.queues:
            queue.group_changed(request.group)

    def end(self, request, tokens):
        self.running.remove(request)
        request.generated_tokens += tokens
        self.finish(request)

    def abort(self, request):
        if request in self.running:
            self.running.remove(request)
        else:
            self.take(request)
        self.finish(request, learn=False)


def queue_of(surprise=0.01, guard_interval=0, turn_tokens=1):
    return LongestPlausible(surprise, guard_interval, turn_tokens)


def test_it_is_a_prioritizer():
    assert isinstance(queue_of(), Prioritizer)


@pytest.mark.parametrize("interval", [0, 1])
def test_an_empty_queue_offers_nothing(interval):
    queue = queue_of(guard_interval=interval)
    assert queue.peek() is None
    assert len(queue) == 0


def test_groups_that_have_taught_nothing_take_turns_fewest_tokens_first():
    rollout = Rollout(queue_of())
    rollout.add(2)
    rollout.add(1)
    requests = [rollout.serve() for _ in range(3)]
    for request, tokens in zip(requests, (30, 10, 20), strict=True):
        rollout.come_back(request, tokens)
    assert [rollout.serve() for _ in range(3)] == [requests[1], requests[2], requests[0]]


def test_a_group_that_has_shown_to_be_short_waits():
    rollout = Rollout(queue_of(surprise=0.1))
    short = rollout.add(4)
    rollout.add(4)
    for request in [request for request in rollout.waiting if request.group is short][:3]:
        rollout.take(request)
        rollout.running.append(request)
        rollout.end(request, 1)
    assert [rollout.serve().group.id for _ in range(5)] == ["g1", "g1", "g1", "g1", "g0"]


def test_a_sibling_that_is_still_running_keeps_its_group_from_looking_short():
    order = {}
    for tokens in (1, 40):
        rollout = Rollout(queue_of(surprise=0.1))
        rollout.add(4)
        rollout.add(3)
        first, second, _ = (rollout.serve() for _ in range(3))
        rollout.come_back(second, tokens)
        rollout.end(first, 2)
        for mate in list(rollout.waiting):
            if mate.group.seq == 1:
                rollout.take(mate)
                rollout.running.append(mate)
                rollout.come_back(mate, 20)
        order[tokens] = rollout.serve().group.id
    assert order == {1: "g1", 40: "g0"}


def test_a_finished_response_counts_with_its_last_chunk():
    queue = queue_of(surprise=0.1)
    rollout = Rollout(queue)
    rollout.add(3)
    first = rollout.serve()
    rollout.come_back(first, 5)
    rollout.take(first)
    rollout.running.append(first)
    rollout.end(first, 4)
    assert queue._groups[0].tokens == 9


def test_a_chunk_that_was_given_back_counts_for_nothing():
    queue = queue_of()
    rollout = Rollout(queue)
    rollout.add(2)
    rollout.come_back(rollout.serve(), 0)
    assert queue._groups[0].tokens == 0


def test_within_a_turn_a_request_keeps_its_place():
    rollout = Rollout(queue_of(turn_tokens=10))
    rollout.add(2)
    first = rollout.serve()
    rollout.come_back(first, 6)
    assert rollout.serve() is first
    rollout.come_back(first, 6)
    assert rollout.serve() is not first


def test_every_guard_interval_th_decision_serves_what_has_waited_longest():
    rollout = Rollout(queue_of(surprise=0.5, guard_interval=3))
    rollout.add(6)
    rollout.add(9)
    rollout.end(rollout.serve(), 1)
    assert [rollout.serve().group.id for _ in range(8)] == ["g1", "g0", "g1", "g1", "g0", "g1", "g1", "g0"]


@pytest.mark.parametrize("interval", [1, 2, 5])
def test_the_guard_starves_no_request_however_wrong_the_estimates(interval):
    rollout = Rollout(queue_of(surprise=0.5, guard_interval=interval))
    for _ in range(10):
        rollout.add(3)
    for request in list(rollout.waiting[::3]):
        rollout.take(request)
        rollout.running.append(request)
        rollout.end(request, request.group.seq)
    since = dict.fromkeys((request.seq for request in rollout.waiting), 0)
    for decision in range(1, 30 * interval * len(since)):
        request = rollout.serve()
        since[request.seq] = decision
        rollout.come_back(request, 0)
        assert decision - min(since.values()) <= interval * len(since)


@settings(max_examples=200, deadline=None)
@given(
    interval=st.sampled_from([0, 1, 2, 3, 7]),
    turn_tokens=st.sampled_from([1, 4, 100]),
    surprise=st.sampled_from([0.5, 0.1, 0.01, 1e-12]),
    data=st.data(),
)
def test_nothing_is_lost_and_the_order_is_the_references(interval, turn_tokens, surprise, data):
    rollout = Rollout(
        LongestPlausible(surprise, interval, turn_tokens), Reference(surprise, interval, turn_tokens)
    )
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
            assert len({queue.peek() for queue in rollout.queues for _ in range(2)}) == 1
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
    served = []
    while (request := rollout.serve()) is not None:
        served.append(request)
    assert len(served) == len(set(served))
    assert rollout.waiting == []


def entries(queue):
    """Count what the heaps hold, stale or not."""
    return len(queue._queue) + sum(len(group.heap) for group in queue._groups.values())


@pytest.mark.parametrize("interval", [0, 2, 32])
def test_memory_stays_bounded_over_many_chunks(interval):
    rollout = Rollout(queue_of(guard_interval=interval))
    for _ in range(20):
        rollout.add(5, max_tokens=10_000)
    for _ in range(5000):
        rollout.come_back(rollout.serve(), 1)
    assert entries(rollout.queues[0]) <= 64 + 4 * 20 + 2 * rollout.requests


def test_nothing_is_kept_of_groups_that_are_over():
    queue = queue_of(guard_interval=4)
    rollout = Rollout(queue)
    for _ in range(200):
        rollout.add(3)
    while (request := rollout.serve()) is not None:
        rollout.end(request, 5)
    assert queue._groups == {}
    assert entries(queue) <= 64 + 4 * 200


def test_equal_remainders_go_by_arrival():
    rollout = Rollout(queue_of())
    for _ in range(4):
        rollout.add(2)
    order = [rollout.serve().seq for _ in range(8)]
    assert all(before < after for before, after in pairwise(order))


def test_the_hook_passes_its_settings_on():
    chosen = Settings(surprise=0.2, guard_interval=7, turn_tokens=9)
    queue = seer_length_posterior.seer_make_prioritizer(chosen, SimpleNamespace())
    assert (queue.surprise, queue.guard_interval, queue.turn_tokens) == (0.2, 7, 9)


@pytest.mark.parametrize(("key", "value"), [("guard_interval", -1), ("surprise", 0), ("turn_tokens", 0)])
def test_settings_out_of_range_are_refused(key, value):
    with pytest.raises(msgspec.ValidationError, match=key):
        msgspec.convert({key: value}, Settings)


def test_a_rollout_says_the_same_whether_the_plug_in_orders_it_or_not(tmp_path):
    said = []
    for plugins in (["divided_rollout"], ["divided_rollout", "length_posterior"]):
        tree = {
            "seer": {"plugins": plugins, "engine": "sim", "kv_pool": "none"},
            "rollout": {"n": 4, "max_tokens": 900},
            "engine": {"sim": {"kv_capacity_tokens": 2048, "max_model_tokens": 2048}},
            "plugin": {"divided_rollout": {"chunk_tokens": 64}},
        }
        config = make_config(tree, base_dir=tmp_path, origin="test")
        result = rollout(config, [{"group_id": f"g{k}", "prompt": "x" * 20} for k in range(12)])
        assert result.summary.requests == 48
        said.append({each.request_id: list(each.token_ids) for each in result.completions})
    assert said[0] == said[1]
