"""Turns: a request acts from the model's stop to its environment's answer, and holds nothing meanwhile."""

import pytest

from seer_core.errors import TransitionError
from seer_core.model.events import (
    AskEnvironment,
    ChunkFinished,
    Complete,
    Dispatch,
    EnvironmentAnswered,
    GroupSpec,
    ResumedResponse,
)
from seer_core.scheduling.defaults import LeastLoaded
from seer_core.scheduling.scheduler import Policies, Slot


def test_a_stop_asks_the_environment_and_gives_everything_back(rig):
    rig.start("a", kv=200)
    rig.group("g", turns=True)
    assert rig.finish("g/0", 20, stopped=True) == [AskEnvironment("g/0")]
    status = rig.scheduler.instances["a"]
    assert (status.running, status.reserved_kv_tokens) == (0, 0)


def test_the_request_goes_on_behind_the_answer(rig):
    rig.start("a")
    rig.group("g", prompt=10, max_tokens=100, turns=True)
    rig.finish("g/0", 20, stopped=True)
    assert rig.answer("g/0", 5) == [Dispatch("g/0", "a", 75, 110, migrated=False)]


def test_a_stop_without_an_environment_ends_the_response(rig):
    rig.start("a")
    rig.group("g")
    assert rig.finish("g/0", 20, stopped=True) == [Complete("g/0", "stop")]


def test_an_answer_that_is_done_ends_the_response_with_reason_stop(rig):
    rig.start("a")
    rig.group("g", turns=True)
    rig.finish("g/0", 20, stopped=True)
    assert rig.answer("g/0", 0, done=True) == [Complete("g/0", "stop")]


def test_an_answer_that_fills_the_response_ends_it_with_reason_length(rig):
    rig.start("a")
    rig.group("g", max_tokens=30, turns=True)
    rig.finish("g/0", 20, stopped=True)
    assert rig.answer("g/0", 10) == [Complete("g/0", "length")]


def test_a_response_that_is_cut_at_its_limit_is_over_without_the_environment(rig):
    rig.start("a")
    rig.group("g", max_tokens=30, turns=True)
    assert rig.finish("g/0", 30) == [Complete("g/0", "length")]


def test_a_stop_on_the_very_last_token_still_asks_the_environment(rig):
    rig.start("a")
    rig.group("g", max_tokens=30, turns=True)
    assert rig.finish("g/0", 30, stopped=True) == [AskEnvironment("g/0")]
    assert rig.answer("g/0", 0, done=True) == [Complete("g/0", "stop")]


def test_an_environment_that_fails_ends_the_response_with_reason_error(rig):
    rig.start("a")
    rig.group("g", n=2, turns=True)
    rig.finish("g/0", 20, stopped=True)
    assert rig.fail_environment("g/0") == [Complete("g/0", "error")]
    assert "g/1" in rig.in_flight


def test_others_run_while_a_request_acts(rig):
    rig.start("a", slots=1)
    rig.group("g", n=2, turns=True)
    asked, sent = rig.finish("g/0", 20, stopped=True)
    assert (asked, sent.request_id) == (AskEnvironment("g/0"), "g/1")


def test_a_rollout_whose_requests_all_act_does_not_stand_still(rig):
    rig.start("a")
    rig.group("g", n=3, turns=True)
    for index in range(3):
        rig.finish(f"g/{index}", 20, stopped=True)
    rig.start("b")
    assert rig.acting == {"g/0", "g/1", "g/2"}


def test_requests_may_wait_for_the_end_of_others_turns(make_rig):
    """A placer may keep a request waiting while another acts, for the answer is an event to come."""

    class OneAtATime:
        def place(self, request, chunk_tokens, instances):
            return instances[0] if request.id == "g/0" else None

    rig = make_rig(Policies(placer=Slot("placer", "mine", OneAtATime())))
    rig.start("a")
    rig.group("g", n=2, turns=True)
    assert rig.finish("g/0", 20, stopped=True) == [AskEnvironment("g/0")]


def test_strategies_are_notified_of_each_tool_that_begins(make_rig):
    ended = []

    class Watch(LeastLoaded):
        def turn_ended(self, request):
            ended.append((request.id, request.instance, request.state.value, request.generated_tokens))

    rig = make_rig(Policies(placer=Slot("placer", "mine", Watch())))
    rig.start("a")
    rig.group("g", max_tokens=100, turns=True)
    rig.finish("g/0", 20, stopped=True)
    rig.answer("g/0", 5)
    rig.finish("g/0", 7, stopped=True)
    rig.answer("g/0", 0, done=True)
    assert set(ended) == {("g/0", "a", "acting", 20), ("g/0", "a", "acting", 32)}


def test_an_acting_request_can_be_aborted(rig):
    rig.start("a")
    rig.group("g", turns=True)
    rig.finish("g/0", 20, stopped=True)
    assert rig.abort("g/0") == [Complete("g/0", "aborted")]


def test_an_answer_during_a_pause_is_gone_on_with_after_it(rig):
    rig.start("a")
    rig.group("g", turns=True)
    rig.finish("g/0", 20, stopped=True)
    rig.pause()
    assert rig.answer("g/0", 5) == []
    (sent,) = rig.resume()
    assert sent.request_id == "g/0"


def test_a_request_whose_instance_is_lost_while_it_acts_counts_on_no_kv_there(rig):
    rig.start("a")
    rig.start("b")
    rig.group("g", turns=True)
    rig.finish("g/0", 20, stopped=True)
    rig.lose("a")
    assert rig.answer("g/0", 5) == [Dispatch("g/0", "b", 75, 110, migrated=False)]


def test_a_request_whose_instance_leaves_while_it_acts_moves_on(rig):
    rig.start("a")
    rig.start("b")
    rig.group("g", turns=True)
    rig.finish("g/0", 20, stopped=True)
    rig.leave("a")
    (sent,) = rig.answer("g/0", 5)
    assert sent.instance_id == "b"


def test_a_resumed_request_that_acts_is_asked_about_at_once(rig):
    rig.start("a")
    left = (ResumedResponse(20, acting=True), ResumedResponse(7))
    asked, sent = rig.submit(GroupSpec("g", 10, 2, 100, resumed=left, turns=True))
    assert (asked, sent.request_id, sent.max_tokens) == (AskEnvironment("g/0"), "g/1", 93)
    rig.answer("g/0", 5)
    assert rig.in_flight["g/0"].max_tokens == 75


@pytest.mark.parametrize("tokens", [-1, 81])
def test_an_answer_without_room_is_a_defect_of_the_runtime(rig, tokens):
    rig.start("a")
    rig.group("g", turns=True)
    rig.finish("g/0", 20, stopped=True)
    with pytest.raises(TransitionError, match="where 80 have room"):
        rig.answer("g/0", tokens)


def test_an_answer_to_a_request_that_does_not_act_is_refused(rig):
    rig.start("a")
    rig.group("g", turns=True)
    with pytest.raises(TransitionError, match="does not wait for an answer"):
        rig.scheduler.handle(EnvironmentAnswered("g/0", 5, False), 9.0)
    with pytest.raises(TransitionError, match="does not wait for an answer"):
        rig.scheduler.handle(EnvironmentAnswered("h/0", 5, False), 9.0)


def test_a_chunk_of_an_acting_request_is_refused(rig):
    rig.start("a")
    rig.group("g", turns=True)
    rig.finish("g/0", 20, stopped=True)
    with pytest.raises(TransitionError, match="does not run there"):
        rig.scheduler.handle(ChunkFinished("g/0", "a", 5, False), 9.0)
