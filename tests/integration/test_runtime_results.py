"""Rollouts of a runtime: completions, their order, and the same tokens however they came."""

import pytest
from seer_divided_rollout import Chunks
from seer_session.session import rollout
from seer_trace.records import TraceWriter, replay

from seer_core.errors import (
    PromptError,
    SeerError,
)
from seer_core.ports.policy import Placer
from seer_core.scheduling.scheduler import Scheduler, Slot

from .helpers import SIM, Recorder, divided, outputs, play, policies, roll_out


class Rotate(Placer):
    """A placer that sends every chunk of a request to another instance than the one before."""

    def place(self, request, chunk_tokens, instances):
        return instances[(request.index + request.chunks) % len(instances)]


def test_completions_stream_in_the_order_of_their_finish(simulated, some_groups):
    async def run():
        async with simulated(divided()) as runtime:
            under_way = runtime.rollout(some_groups(6, 4, 600))
            streamed = [completion async for completion in under_way]
            return streamed, under_way.result

    streamed, result = play(run())
    assert result.completions == streamed
    times = [completion.finished_s for completion in streamed]
    assert times == sorted(times)
    assert len({completion.request_id for completion in streamed}) == 24
    assert len(set(times)) > 6
    summary = result.summary
    assert (summary.requests, summary.groups) == (24, 6)
    assert summary.tokens == sum(len(completion.token_ids) for completion in streamed)
    assert summary.chunks == sum(len(completion.chunks) for completion in streamed)
    assert summary.total_time_s == times[-1]
    assert 0 <= summary.tail_time_s < summary.total_time_s


def test_a_completion_can_be_read_while_others_run(by_hand, hand, some_groups):
    engine = hand()

    async def run():
        async with by_hand(engine) as runtime:
            under_way = runtime.rollout(some_groups(1, 3))
            engine.finish("a/1#1@hand-0", 4)
            first = await anext(under_way)
            assert (first.request_id, first.token_ids, first.text) == ("a/1", [5, 6, 7, 8], None)
            assert sorted(engine.jobs) == ["a/0#0@hand-0", "a/2#2@hand-0"]
            engine.finish()
            engine.finish()
            assert under_way.unread() == under_way.result.completions[1:]
            with pytest.raises(StopAsyncIteration):
                await anext(under_way)

    play(run())


def test_a_completion_lists_its_chunks_and_instances(by_hand, hand, some_groups):
    engines = [hand("x"), hand("y")]

    async def run():
        async with by_hand(*engines, policies=policies(splitter=Chunks(8), placer=Rotate())) as runtime:
            under_way = runtime.rollout(some_groups(1, 1, 20))
            engines[0].finish(tokens=8, stopped=False)
            engines[1].finish(tokens=8, stopped=False)
            job = engines[0].jobs["a/0#2@x"]
            assert job.token_ids == [10, 11, 12, 13, *range(5, 21)]
            assert (job.prompt_tokens, job.max_tokens) == (4, 4)
            engines[0].finish(tokens=4, stopped=False)
            return await under_way.wait()

    (completion,) = play(run()).completions
    assert completion.token_ids == list(range(5, 25))
    assert completion.finish_reason == "length"
    assert completion.instances == ["x", "y"]
    assert [(chunk.instance, chunk.tokens) for chunk in completion.chunks] == [("x", 8), ("y", 8), ("x", 4)]
    # A chunk's own work is one position per token; the rest had been computed before.
    assert [chunk.recomputed_tokens for chunk in completion.chunks] == [0, 11, 19]


def test_nothing_to_roll_out_is_a_result_too(simulated):
    result = roll_out(simulated(), [])
    assert (result.completions, result.summary.requests, result.summary.tokens) == ([], 0, 0)


def test_the_short_form_reads_a_config_and_records(write_config):
    path = write_config(["divided_rollout"], "[rollout]\nn = 2\nmax_tokens = 8")
    result = rollout(path, [{"prompt": "hi", "group_id": "g"}, {"prompt_token_ids": [5], "n": 1}])
    assert {completion.request_id for completion in result.completions} == {"g/0", "g/1", "c92ff0d93c2a/0"}
    assert all(completion.text for completion in result.completions)


def test_the_short_form_gives_each_iteration_other_responses(write_config):
    config = write_config((), "[rollout]\nn = 2\nmax_tokens = 8\n")
    first, again, second = (outputs(rollout(config, [{"prompt": "a"}], iteration)) for iteration in (0, 0, 1))
    assert first == again
    assert first.keys() == second.keys()
    assert not any(first[name] == second[name] for name in first)


def test_one_runtime_rolls_out_batch_after_batch(simulated, some_groups):
    async def run():
        async with simulated() as runtime:
            first = await runtime.rollout(some_groups(3)).wait()
            return first, await runtime.rollout(some_groups(3)).wait()

    first, second = play(run())
    assert outputs(first) == outputs(second)


KILLS = [
    {"instance": "sim-1", "at_s": 2.0, "restart_after_s": 1.0},
    {"instance": "sim-0", "at_s": 6.5},
    {"instance": "sim-1", "at_s": 7.0, "restart_after_s": 1000.0},
]


def test_the_same_prompts_get_other_responses_in_each_iteration(simulated):
    records = [{"prompt_token_ids": [1, 2, 3], "n": 3}, {"prompt_token_ids": [4], "group_id": "mine", "n": 3}]
    records.append({"prompt_token_ids": [5], "seed": 7, "n": 3})  # this one asks for repetition
    runtime = simulated()

    async def run():
        async with runtime:
            return [outputs(await runtime.rollout(runtime.groups(records)).wait()) for _ in range(3)]

    first, second, third = play(run())
    fixed = {name for name, response in first.items() if response == second[name] == third[name]}
    assert fixed == {name for name in first if name.startswith(runtime.groups(records)[2].id)}
    assert len(first) == 9
    for name in {*first} - fixed:
        assert len({repr(each[name][0]) for each in (first, second, third)}) == 3


def test_an_iteration_is_counted_when_its_rollout_begins_and_repeated_on_request(simulated, some_groups):
    records = [{"prompt_token_ids": [1, 2, 3], "n": 2}]
    runtime = simulated()

    async def run():
        async with runtime:
            prepared = runtime.groups(records)
            assert runtime.groups(records) == prepared  # to build groups is not to roll out
            first = await runtime.rollout(prepared).wait()
            with pytest.raises(PromptError):
                runtime.rollout(some_groups(1, 1, 10**6))
            assert runtime.iteration == 1
            assert runtime.groups(records) != prepared
            assert runtime.groups(records, iteration=0) == prepared
            again = await runtime.rollout(runtime.groups(records, iteration=0)).wait()
            return outputs(first) == outputs(again)

    assert play(run())


def test_whole_divided_migrated_and_interrupted_responses_have_the_same_tokens(simulated, some_groups):
    groups = some_groups(40, 8, 1000)
    expected = roll_out(simulated(**SIM), groups)
    assert expected.summary.tokens >= 100_000
    assert expected.summary.chunks == 320

    chunked = roll_out(simulated(divided(), **SIM), groups)
    assert chunked.summary.chunks > 1600
    assert outputs(chunked) == outputs(expected)

    moved = roll_out(simulated(policies(splitter=Chunks(96), placer=Rotate()), **SIM), groups)
    assert moved.summary.migrations > 700
    assert outputs(moved) == outputs(expected)

    for each in (None, divided()):
        shot = roll_out(simulated(each, **SIM, kill_at_s=KILLS), groups)
        assert shot.summary.instances_lost == 3
        assert outputs(shot) == outputs(expected)


def test_a_trace_with_losses_and_aborts_replays(simulated, some_groups, tmp_path):
    async def run(runtime):
        async with runtime:
            under_way = runtime.rollout(some_groups(20, 4, 600))
            async for completion in under_way:
                if len(under_way.result.completions) % 8 == 0:
                    under_way.abort_request(f"{completion.group_id}/{(completion.index + 1) % 4}")
            return under_way.result

    kills = [{"instance": "sim-1", "at_s": 0.6, "restart_after_s": 0.3}, {"instance": "sim-0", "at_s": 1.2}]
    trace = TraceWriter(tmp_path / "trace.jsonl")
    recorder = Recorder()
    observers = [Slot("observer", "trace", trace), Slot("observer", "recorder", recorder)]
    result = play(run(simulated(divided(), observers, **SIM, kill_at_s=kills)))
    trace.close()
    assert result.summary.instances_lost == 2
    assert result.summary.finish_reasons["aborted"] > 0
    assert replay(tmp_path / "trace.jsonl", Scheduler(divided())) == len(recorder.seen)
    with pytest.raises(SeerError, match="replay differs at record"):
        replay(tmp_path / "trace.jsonl", Scheduler(divided(32)))


def test_a_broken_trace_names_its_line(tmp_path):
    (tmp_path / "trace.jsonl").write_text('{"now": 1}\n')
    with pytest.raises(SeerError, match=r"trace.jsonl:1: not a trace record"):
        replay(tmp_path / "trace.jsonl", Scheduler())
