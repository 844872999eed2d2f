from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import hypothesis.strategies as st
import msgspec
import pytest
import seer_length_posterior
from hypothesis import given, settings
from seer_host.config_files import make_config
from seer_host.contract_checks import flaw_of
from seer_length_posterior import SHAPES, GroupPosterior, LongestPlausible, Settings, Shapes
from seer_session import rollout
from seer_testing import QueueHarness

from seer_core.model import RequestState
from seer_core.model.events import GroupSpec
from seer_core.ports.policy import Prioritizer
from seer_core.scheduling.buffer import RequestBuffer
from seer_core.scheduling.context import ContextManager

MAX_TOKENS = 50


class Reference:
    """An order by the definition: it looks at everything each time."""

    def __init__(self, surprise, turn_tokens):
        self.surprise = surprise
        self.turn_tokens = turn_tokens
        self.waiting = []
        self.shapes = Shapes()
        self.lengths = {}
        self.seen = {}
        self.finished = {}
        self.over = set()

    def push(self, request):
        self.waiting.append(request)
        self.finished.setdefault(request.group.family or request.group, request.group.finished)
        self.learn(request)

    def learn(self, request, over=False):
        """Take note of what a request has generated since the last time."""
        lengths = self.lengths.setdefault(request.group, GroupPosterior(self.shapes))
        before = self.seen.setdefault(request, 0)
        self.seen[request] = request.generated_tokens
        lengths.grow(before, request.generated_tokens, over)

    def peek(self):
        return min(self.waiting, key=self.rank, default=None)

    def rank(self, request):
        group = request.group
        before = request.generated_tokens // self.turn_tokens * self.turn_tokens
        mates = [mate.generated_tokens // self.turn_tokens for mate in self.waiting if mate.group is group]
        first = min(mates) * self.turn_tokens
        plausible = min(group.max_tokens, self.lengths[group].plausible_tokens(first, self.surprise))
        return first - plausible, group.seq, before, -request.generated_tokens, request.seq

    def take(self, request):
        self.waiting.remove(request)

    def group_changed(self, group, request):
        known = group.family or group  # the groups of a family count together
        ended = group.finished > self.finished[known]
        self.finished[known] = group.finished
        for request in self.seen:
            tokens = request.generated_tokens
            if request.group is group and request.state is RequestState.FINISHED and self.open(request):
                self.learn(request, ended and 0 < tokens < group.max_tokens)

    def open(self, request):
        """Return whether a finished request is met for the first time."""
        return not (request in self.over or self.over.add(request))

    def __len__(self):
        return len(self.waiting)


def rollout_of(*queues):
    return QueueHarness(*queues, max_tokens=MAX_TOKENS)


def queue_of(surprise=0.05, turn_tokens=1):
    return LongestPlausible(surprise, turn_tokens)


def test_it_is_a_prioritizer():
    assert flaw_of(queue_of(), Prioritizer) is None


def test_an_empty_queue_offers_nothing():
    queue = queue_of()
    assert queue.peek() is None
    assert len(queue) == 0


def test_groups_without_a_finished_response_take_turns_fewest_tokens_first():
    rollout = rollout_of(queue_of())
    rollout.add(2)
    rollout.add(1)
    requests = [rollout.serve() for _ in range(3)]
    for request, tokens in zip(requests, (30, 10, 20), strict=True):
        rollout.come_back(request, tokens)
    assert [rollout.serve() for _ in range(3)] == [requests[1], requests[2], requests[0]]


def test_a_group_that_has_shown_to_be_short_waits():
    rollout = rollout_of(queue_of(surprise=0.1))
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
        rollout = rollout_of(queue_of(surprise=0.1))
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
    rollout = rollout_of(queue)
    rollout.add(3)
    first = rollout.serve()
    rollout.come_back(first, 5)
    rollout.take(first)
    rollout.running.append(first)
    rollout.end(first, 4)
    assert queue._groups[0].lengths.totals == pytest.approx([9**shape for shape in SHAPES])
    assert queue._groups[0].lengths.finished == 1


@pytest.mark.parametrize("cut_off", ["limit", "abort"])
def test_a_response_that_was_cut_off_only_shows_that_it_would_have_been_longer(cut_off):
    queue = queue_of()
    rollout = rollout_of(queue)
    rollout.add(2)
    request = rollout.serve()
    if cut_off == "limit":
        rollout.end(request, MAX_TOKENS)
    else:
        request.generated_tokens = MAX_TOKENS
        rollout.abort(request)
    assert queue._groups[0].lengths.totals == pytest.approx([MAX_TOKENS**shape for shape in SHAPES])
    assert queue._groups[0].lengths.finished == 0


def test_a_chunk_that_was_given_back_counts_for_nothing():
    queue = queue_of()
    rollout = rollout_of(queue)
    rollout.add(2)
    rollout.come_back(rollout.serve(), 0)
    assert queue._groups[0].lengths.totals == [0, 0, 0]


def test_within_a_turn_a_request_keeps_its_place():
    rollout = rollout_of(queue_of(turn_tokens=10))
    rollout.add(2)
    first = rollout.serve()
    rollout.come_back(first, 6)
    assert rollout.serve() is first
    rollout.come_back(first, 6)
    assert rollout.serve() is not first


def test_nothing_starves_for_what_runs_comes_nearer_to_its_end():
    rollout = rollout_of(queue_of())
    short = rollout.add(2)
    rollout.add(20)
    mate, first = rollout.waiting[:2]
    rollout.take(first)
    rollout.running.append(first)
    rollout.end(first, 1)
    served = []
    while mate in rollout.waiting:
        request = rollout.serve()
        served.append(request)
        if request.generated_tokens + 10 < request.group.max_tokens:
            rollout.come_back(request, 10)
    assert short.finished == 1
    assert len(served) <= 1 + 20 * MAX_TOKENS // 10


@settings(max_examples=200, deadline=None)
@given(
    turn_tokens=st.sampled_from([1, 4, 100]),
    surprise=st.sampled_from([0.5, 0.1, 0.01, 1e-12]),
    data=st.data(),
)
def test_nothing_is_lost_and_the_order_is_the_references(turn_tokens, surprise, data):
    rollout_of(LongestPlausible(surprise, turn_tokens), Reference(surprise, turn_tokens)).play(data)


def entries(queue):
    """Count what the heaps hold, stale or not."""
    return len(queue._queue) + sum(len(group.heap) for group in queue._groups.values())


def test_memory_stays_bounded_over_many_chunks():
    rollout = rollout_of(queue_of())
    for _ in range(20):
        rollout.add(5, max_tokens=10_000)
    for _ in range(5000):
        rollout.come_back(rollout.serve(), 1)
    assert entries(rollout.queues[0]) <= 64 + 4 * 20 + 2 * rollout.requests


def test_nothing_is_kept_of_groups_that_are_over():
    queue = queue_of()
    rollout = rollout_of(queue)
    for _ in range(200):
        rollout.add(3)
    while (request := rollout.serve()) is not None:
        rollout.end(request, 5)
    assert queue._groups == {}
    assert entries(queue) <= 64 + 4 * 200


def test_equal_remainders_go_by_arrival():
    rollout = rollout_of(queue_of())
    for _ in range(4):
        rollout.add(2)
    order = [rollout.serve().seq for _ in range(8)]
    assert all(before < after for before, after in pairwise(order))


def test_the_hook_passes_its_settings_on():
    chosen = Settings(surprise=0.2, turn_tokens=9)
    queue = seer_length_posterior.seer_make_prioritizer(chosen, SimpleNamespace())
    assert (queue.surprise, queue.turn_tokens) == (0.2, 9)


@pytest.mark.parametrize(("key", "value"), [("surprise", 0), ("surprise", 1), ("turn_tokens", 0)])
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


@pytest.mark.parametrize("finished_first", [True, False])
def test_an_aborted_response_says_no_length_where_another_group_of_its_family_has_finished_one(
    finished_first,
):
    contexts, buffer = ContextManager(), RequestBuffer()
    queue = LongestPlausible(0.05)

    def come(name, n, family=""):
        group = contexts.open(GroupSpec(name, 10, n, 1000, family=family))
        requests = buffer.add_group(group)
        for request in requests:
            queue.push(request)
        return requests

    def end(request, tokens, *, finished):
        queue.take(request)
        request.generated_tokens = tokens
        if finished:
            contexts.record_finished(request)
        buffer.finish(request)
        contexts.close(request)
        queue.group_changed(request.group, request)

    [quick] = come("a", 1, "f")
    if finished_first:
        end(quick, 5, finished=True)
    aborted, left = come("b", 2, "f")
    if not finished_first:
        end(quick, 5, finished=True)
    come("c", 1)
    end(aborted, 5, finished=False)
    assert queue.peek() is left  # its group may still have the longest responses, and came first
