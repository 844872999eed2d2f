"""``seer explain``: the waits and chunks of one request, from a trace."""

import json

import msgspec
import pytest
from seer_cli.explain import life_of
from seer_cli.request_wording import rows_of_life, sums
from seer_trace.chunk_runs import ChunkRun
from seer_trace.records import TraceRecord, read_trace
from seer_trace.request_life import LifeReader, Wait

from seer_core.errors import InputError
from seer_core.model import InstanceInfo
from seer_core.model.events import (
    Abort,
    AskEnvironment,
    ChunkFailed,
    ChunkFinished,
    Complete,
    Dispatch,
    EnvironmentAnswered,
    EnvironmentFailed,
    GroupSpec,
    GroupsSubmitted,
    InstanceLeaving,
    InstanceLost,
    InstanceStarted,
    RequestsAborted,
    ResumedResponse,
    RolloutPaused,
    RolloutResumed,
)

GROUP = GroupSpec("a", prompt_tokens=10, n=2, max_tokens=100)


def started(name="x", slots=2, kv=100):
    return InstanceStarted(InstanceInfo(name, kv, 1, slots, 1024))


def sent(request, instance="x", kv=40, **more):
    return Dispatch(request, instance, 50, kv, more.pop("migrated", False), **more)


def over(request, instance="x", tokens=50, stopped=False, **more):
    return ChunkFinished(request, instance, tokens, stopped, **more)


def life(*records, request="a/1"):
    return life_of(request, [TraceRecord(now, event, list(commands)) for now, event, *commands in records])


def test_a_request_waits_for_a_slot_for_kv_and_for_its_turn():
    found = life(
        (0.0, started(slots=2, kv=100)),
        (1.0, GroupsSubmitted((GROUP,)), sent("a/0"), sent("b/0")),
        (3.0, over("b/0"), sent("b/1", kv=50)),  # 2 s without a slot; then a slot, and KV for 10
        (6.0, over("b/1", stopped=True)),  # from then on there is a slot, and KV for 60
        (7.0, over("a/0"), sent("a/1", kv=45)),
        (9.0, over("a/1", stopped=True), Complete("a/1", "stop")),
    )
    wait, chunk = found.parts
    assert wait == Wait(1.0, 7.0, {"slots": 5.0, "turn": 1.0})
    assert (chunk.begin_s, chunk.end_s, chunk.instance_id, chunk.end) == (
        7.0,
        9.0,
        "x",
        "the model ended the response",
    )
    assert (found.tokens, found.finished_s, found.finish_reason, found.siblings_done) == (50, 9.0, "stop", [])


def test_tokens_from_before_a_resume_are_named_and_a_response_that_was_over_then_has_no_others():
    left = (ResumedResponse(40, "stop"), ResumedResponse(20))
    records = [
        (0.0, started()),
        (
            1.0,
            GroupsSubmitted((msgspec.structs.replace(GROUP, resumed=left),)),
            Complete("a/0", "stop"),
            sent("a/1"),
        ),
        (2.0, over("a/1", stopped=True), Complete("a/1", "stop")),
    ]
    over_before, went_on = life(*records, request="a/0"), life(*records)
    assert sums(over_before) == "40 tokens, all from before the run was resumed; its trace begins there"
    assert sums(went_on).startswith(
        "50 tokens after 20 from before the run was resumed in 1.00 s, finish reason"
    )


def test_a_response_that_was_given_up_is_no_estimate_of_its_group():
    found = life(
        (0.0, started(slots=2, kv=100)),
        (1.0, GroupsSubmitted((GROUP,)), sent("a/0"), sent("a/1")),
        (2.0, over("a/0"), sent("a/0")),
        (3.0, RequestsAborted(("a/0",)), Abort("a/0", "x"), Complete("a/0", "aborted")),
        (4.0, over("a/1"), sent("a/1")),
        (5.0, over("a/1", stopped=True), Complete("a/1", "stop")),
    )
    assert found.estimate_at(4.0) is None  # as for the scheduler
    assert found.siblings_done == [(3.0, 50)]


def test_each_row_has_the_estimate_that_the_group_gave_then():
    found = life(
        (0.0, started(slots=2, kv=100)),
        (0.0, GroupsSubmitted((GROUP,)), sent("a/1")),
        (1.0, over("a/1", tokens=5), sent("a/1"), sent("a/0")),
        (2.0, over("a/0", tokens=30, stopped=True), Complete("a/0", "stop")),
        (3.0, over("a/1", tokens=40), sent("a/1")),
        (4.0, over("a/1", tokens=40, stopped=True), Complete("a/1", "stop")),
    )
    assert [found.estimate_at(at_s) for at_s in (0.0, 1.9, 2.0, 3.0)] == [None, None, 30, 30]
    assert [row[4] for row in rows_of_life(found)] == ["none done", "none done", "30"]


def test_a_lack_of_kv_is_measured_by_what_its_chunk_got_in_the_end():
    found = life(
        (0.0, started(slots=3, kv=100)),
        (0.0, GroupsSubmitted((GROUP,)), sent("a/0", kv=80)),
        (4.0, ChunkFailed("a/0", "x", "no reason"), Complete("a/0", "error")),
        (5.0, over("z/0"), sent("a/1", kv=30)),
    )
    assert found.parts[0] == Wait(0.0, 5.0, {"kv": 4.0, "turn": 1.0})
    assert found.siblings_done == [(4.0, 0)]
    assert found.parts[1].end == "under way when the trace ended"


def test_a_lost_instance_a_pause_and_a_move_are_each_named():
    found = life(
        (0.0, started("x")),
        (0.0, GroupsSubmitted((GROUP,)), sent("a/1", why="only one")),
        (1.0, InstanceLost("x", "killed")),
        (3.0, started("y"), sent("a/1", "y", migrated=True)),
        (4.0, RolloutPaused()),
        (4.5, over("a/1", "y", tokens=20)),
        (6.0, RolloutResumed(), sent("a/1", "y")),
        (7.0, InstanceLeaving("y", "drained")),
        (8.0, over("a/1", "y")),
        (9.0, RequestsAborted(("a/1",)), Complete("a/1", "aborted")),
    )
    first, gone, second, paused, third, leaving = found.parts
    assert (first.why, first.end, first.result) == ("only one", "lost with its instance: killed", None)
    assert gone == Wait(1.0, 3.0, {"instances": 2.0})
    assert (second.migrated, second.end, second.result.tokens) == (True, "ended early", 20)
    assert paused == Wait(4.5, 6.0, {"paused": 1.5})
    assert third.end == "whole"
    assert leaving == Wait(8.0, 9.0, {"slots": 1.0})
    assert found.waited_s() == {"instances": 2.0, "paused": 1.5, "slots": 1.0}
    assert found.tokens == 70
    assert found.finish_reason == "aborted"


def test_an_aborted_chunk_is_over_at_once():
    found = life(
        (0.0, started()),
        (0.0, GroupsSubmitted((GROUP,)), sent("a/0"), sent("a/1")),
        (1.0, over("a/0", stopped=True), Complete("a/0", "stop")),
        (2.0, RequestsAborted(("a/1",)), Abort("a/1", "x"), Complete("a/1", "aborted")),
    )
    [chunk] = found.parts
    assert (chunk.end, chunk.end_s, found.siblings_done) == ("aborted", 2.0, [(1.0, 50)])


@pytest.mark.parametrize("request_id", ["a/2", "a", "c/0", "a/x", "", "/"])
def test_a_request_that_is_not_there_is_named_with_one_that_is(request_id):
    with pytest.raises(InputError, match=r"no request .*name one as GROUP/INDEX, like .a/0"):
        life((0.0, GroupsSubmitted((GROUP,))), request=request_id)


def test_every_request_of_a_run_adds_up(seer, write_config, write_prompts, tmp_path):
    config = write_config(["divided_rollout"], "[engine.sim]\ninstances = 2\nmax_running = 2\n")
    prompts = write_prompts(*({"prompt_token_ids": [5] * 8, "n": 4, "max_tokens": 600} for _ in range(3)))
    out = tmp_path / "out"
    result = seer("run", config, "--prompts", prompts, "--out", out)
    assert result.exit_code == 0, result.output
    responses = [json.loads(line) for line in (out / "completions.jsonl").read_text().splitlines()]
    assert len(responses) == 12
    for each in responses:
        saved = tmp_path / "life.json"
        result = seer("explain", out, each["request_id"], "--json", saved)
        assert result.exit_code == 0, result.output
        found = json.loads(saved.read_bytes())
        assert found["tokens"] == len(each["token_ids"])
        assert f"{found['tokens']:,} tokens in" in result.output
        assert f"finish reason {each['finish_reason']}" in result.output
        parts = msgspec.convert(found["parts"], list[Wait | ChunkRun])
        assert sum(part.end_s - part.begin_s for part in parts) == pytest.approx(
            found["finished_s"] - found["submitted_s"]
        )
        for part in parts:
            if isinstance(part, Wait):
                assert sum(part.causes_s.values()) == pytest.approx(part.end_s - part.begin_s)
    assert any("waits" in seer("explain", out, each["request_id"]).output for each in responses)
    records = [*read_trace(out / "trace.jsonl")]
    reader = LifeReader()
    lives = [life for each in records for life in reader.read(each.now, each.event, each.commands)]
    assert lives == [life_of(life.request_id, records) for life in lives]
    assert (len(lives), reader.rest()) == (12, [])


def test_a_run_without_a_trace_is_one_sentence(seer, tmp_path):
    result = seer("explain", tmp_path, "a/0")
    assert result.exit_code == 2
    assert "trace.jsonl" in result.output


def test_the_time_of_an_environment_is_a_part_of_the_life():
    group = GroupSpec("a", prompt_tokens=10, n=2, max_tokens=100, turns=True)
    records = (
        (0.0, started()),
        (0.0, GroupsSubmitted((group,)), sent("a/1"), sent("a/0")),
        (1.0, over("a/1", tokens=20, stopped=True), AskEnvironment("a/1")),
        (4.0, EnvironmentAnswered("a/1", 5, False), sent("a/1")),
        (5.0, over("a/1", tokens=7, stopped=True), AskEnvironment("a/1")),
        (5.5, EnvironmentAnswered("a/1", 0, True), Complete("a/1", "stop")),
        (6.0, over("a/0", tokens=3, stopped=True), AskEnvironment("a/0")),
        (7.0, EnvironmentFailed("a/0", "no network"), Complete("a/0", "error")),
    )
    found = life(*records)
    first, tool, second, judge = found.parts
    assert (first.end, second.end) == ("the model ended its turn", "the model ended its turn")
    assert (tool, judge) == (Wait(1.0, 4.0, {"environment": 3.0}), Wait(5.0, 5.5, {"environment": 0.5}))
    assert (found.tokens, found.answer_tokens, found.waited_s()) == (27, 5, {"environment": 3.5})
    assert "27 tokens, and 5 from its environment in 5.50 s" in sums(found)
    assert rows_of_life(found)[1][3] == "waits 3.00 s for its environment"
    failed = life(*records, request="a/0")
    assert failed.parts[-1] == Wait(6.0, 7.0, {"environment": 1.0})
    assert failed.siblings_done == [(5.5, 32)]
    assert failed.finish_reason == "error"


def test_a_trace_that_ends_while_an_environment_works_shows_it():
    found = life(
        (0.0, started()),
        (0.0, GroupsSubmitted((msgspec.structs.replace(GROUP, turns=True),)), sent("a/1")),
        (1.0, over("a/1", tokens=20, stopped=True), AskEnvironment("a/1")),
        (3.0, InstanceLost("x", "killed")),
    )
    assert found.parts[-1] == Wait(1.0, 3.0, {"environment": 2.0})
