"""Progress: how many requests wait for what, when the tail begins, and the KV that is reserved."""

import pytest
from seer_cli.progress import RunProgress
from seer_testing.harness import SchedulerHarness

from seer_core.model import InstanceInfo
from seer_core.model.events import (
    Abort,
    AskEnvironment,
    ChunkFinished,
    Complete,
    Dispatch,
    EnvironmentAnswered,
    GroupSpec,
    GroupsSubmitted,
    InstanceLost,
    InstanceStarted,
    RequestsAborted,
    ResumedResponse,
    RolloutPaused,
    RolloutResumed,
)


def started(slots=2, kv=1024):
    progress = RunProgress()
    progress.observe(0.0, InstanceStarted(InstanceInfo("x", kv, 16, slots, 64)), [])
    return progress


def send(request, tokens=100, kv=208):
    return Dispatch(request, "x", tokens, kv, False)


def test_requests_wait_for_a_slot_where_all_are_taken_and_for_their_turn_where_one_is_free():
    progress = started()
    progress.observe(0.0, GroupsSubmitted((GroupSpec("a", 100, 5, 400),)), [send("a/0"), send("a/1")])
    assert progress.waiting == {"slots": 3}
    progress.observe(1.0, ChunkFinished("a/0", "x", 50, True), [Complete("a/0", "stop")])
    assert progress.waiting == {"turn": 3}


def test_requests_wait_for_kv_where_their_next_chunk_has_no_room():
    progress = started(slots=8, kv=512)
    groups = GroupSpec("short", 10, 3, 400), GroupSpec("long", 250, 4, 400)
    progress.observe(0.0, GroupsSubmitted(groups), [send("short/0")])
    # 304 tokens are free; a request needs its prompt and 100 more.
    assert progress.waiting == {"kv": 4, "turn": 2}
    progress.observe(1.0, ChunkFinished("short/0", "x", 100, False), [send("long/0", kv=352)])
    # 160 are free; short/0 needs 10 + 100 + 100 by now.
    assert progress.waiting == {"kv": 4, "turn": 2}


def test_the_time_left_of_a_resumed_run_goes_by_the_lengths_that_it_resumed():
    progress = started()
    whole = (ResumedResponse(100, "stop"),) * 9
    group = GroupSpec("a", 100, 10, 400, resumed=(*whole, ResumedResponse(0)))
    over = [Complete(f"a/{index}", "stop") for index in range(9)]
    progress.observe(0.0, GroupsSubmitted((group,)), [*over, send("a/9")])
    progress.observe(1.0, ChunkFinished("a/9", "x", 10, False), [])
    assert progress.left_s == pytest.approx(910 / 9 / 10)


def test_responses_that_were_given_up_foretell_no_length():
    progress = started(slots=8, kv=4096)
    sent = [send(f"a/{index}", kv=16) for index in range(8)]
    progress.observe(0.0, GroupsSubmitted((GroupSpec("a", 100, 9, 4000),)), sent)
    given_up = tuple(f"a/{index}" for index in range(6))
    ended = [each for name in given_up for each in (Abort(name, "x"), Complete(name, "aborted"))]
    progress.observe(0.0, RequestsAborted(given_up), ended)
    assert progress.left_s is None
    progress.observe(10.0, ChunkFinished("a/6", "x", 100, True), [Complete("a/6", "stop")])
    assert progress.left_s == pytest.approx(20.0)  # two of 100 tokens, at 100 in 10 s


def test_requests_wait_for_an_instance_or_for_a_rollout_that_goes_on():
    progress = started()
    progress.observe(0.0, GroupsSubmitted((GroupSpec("a", 100, 4, 400),)), [send("a/0")])
    progress.observe(1.0, RolloutPaused(), [])
    assert progress.waiting == {"paused": 3}
    progress.observe(2.0, RolloutResumed(), [])
    progress.observe(3.0, InstanceLost("x", "gone"), [])
    assert progress.waiting == {"instances": 4}
    progress.observe(4.0, RequestsAborted(("a/0", "a/3")), [Complete(f"a/{n}", "aborted") for n in (0, 3)])
    assert progress.waiting == {"instances": 2}


def test_the_tail_begins_with_the_last_tenth_and_names_the_longest_response():
    progress = started(slots=64)
    names = [f"a/{number}" for number in range(20)]
    progress.observe(0.0, GroupsSubmitted((GroupSpec("a", 100, 20, 4000),)), list(map(send, names)))
    for second, name in enumerate(names[:18], 1):
        assert progress.tail is None
        progress.observe(float(second), ChunkFinished(name, "x", 100, True), [Complete(name, "stop")])
    progress.observe(20.0, ChunkFinished("a/19", "x", 100, False), [])
    progress.observe(30.0, ChunkFinished("a/18", "x", 90, False), [])
    tail = progress.tail
    assert (tail.left, tail.requests, tail.for_s) == (2, 20, 12.0)
    assert (tail.longest_id, tail.longest_tokens) == ("a/19", 100)
    progress.observe(31.0, GroupsSubmitted((GroupSpec("b", 100, 20, 4000),)), [])
    assert progress.tail is None


def test_the_few_responses_of_a_small_run_have_no_tail():
    progress = started()
    progress.observe(0.0, GroupsSubmitted((GroupSpec("a", 100, 2, 400),)), [send("a/0"), send("a/1")])
    for name in ("a/0", "a/1"):
        assert progress.tail is None
        progress.observe(1.0, ChunkFinished(name, "x", 100, True), [Complete(name, "stop")])
    assert progress.tail is None


def test_a_response_that_an_earlier_process_began_counts_with_its_tokens():
    progress = started(slots=64)
    resumed = (ResumedResponse(350), *(ResumedResponse(10, "stop") for _ in range(9)))
    over = [Complete(f"a/{number}", "stop") for number in range(1, 10)]
    progress.observe(0.0, GroupsSubmitted((GroupSpec("a", 100, 10, 400, resumed=resumed),)), over)
    assert (progress.tail.longest_id, progress.tail.longest_tokens) == ("a/0", 350)


def test_reserved_kv_is_the_scheduler_s_own_also_where_siblings_share_their_prompt():
    harness = SchedulerHarness()
    progress = RunProgress()

    def follow():
        for event, commands in harness.seen:
            progress.observe(0.0, event, commands)
        harness.seen.clear()
        status = harness.scheduler.instances["x"]
        assert progress.instances["x"].kv_reserved == status.reserved_kv_tokens / 4096
        return status.running

    harness.start("x", kv=4096, block=16, slots=8, shares_prompts=True)
    harness.submit(GroupSpec("a", 100, 3, 64), GroupSpec("b", 40, 2, 64))
    assert follow() == 5
    for name in ("a/1", "a/0", "b/0", "a/2", "b/1"):
        harness.finish(name, stopped=True)
        follow()
    assert follow() == 0


def test_requests_whose_environment_works_wait_for_no_engine():
    progress = started()
    group = GroupSpec("a", 100, 3, 400, turns=True)
    progress.observe(0.0, GroupsSubmitted((group,)), [send("a/0"), send("a/1")])
    progress.observe(1.0, ChunkFinished("a/0", "x", 50, True), [AskEnvironment("a/0")])
    assert progress.waiting == {"turn": 1, "environment": 1}
    progress.observe(2.0, EnvironmentAnswered("a/0", 20, False), [])
    assert progress.waiting == {"turn": 2}
    assert dict(progress._written())["a/0"] == 70
