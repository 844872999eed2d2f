"""The runtime: the same tokens whatever happens, and nothing lost, mixed or left running."""

import asyncio
import re
import socket

import msgspec
import pytest
import structlog
from seer_context_sched import ContextAware
from seer_divided_rollout import AffordableChunks, Chunks, KvAware
from seer_sim.plugin import Settings

from seer_core.clock import RealClock
from seer_core.config import SeerTable
from seer_core.defaults import FirstComeFirstServed
from seer_core.errors import (
    ConfigError,
    EngineError,
    PluginError,
    PromptError,
    SeerError,
    TransitionError,
    WeightVersionError,
)
from seer_core.events import (
    ChunkFinished,
    InstanceGivenUp,
    InstanceLost,
    InstanceStarted,
    InstanceTroubled,
)
from seer_core.model import InstanceInfo
from seer_core.plugins import Strategies
from seer_core.scheduler import Policies, Scheduler, Slot
from seer_core.session import rollout
from seer_core.trace import TraceWriter, replay


class Rotate:
    """A placer that sends every chunk of a request to another instance than the one before."""

    def instance_changed(self, instance):
        pass

    def instance_lost(self, instance):
        pass

    def place(self, request, chunk_tokens, instances):
        return instances[(request.index + request.chunks) % len(instances)]


class Recorder:
    def __init__(self):
        self.seen = []

    def observe(self, now, event, commands):
        self.seen.append(event)


def policies(**strategies):
    return Policies(**{name: Slot(name, "mine", strategy) for name, strategy in strategies.items()})


def divided(chunk_tokens=64):
    return policies(splitter=Chunks(chunk_tokens), placer=KvAware(0.25), prioritizer=ContextAware(32))


def play(coroutine):
    """Run a coroutine; one that waits for what never comes fails instead of hanging."""
    return asyncio.run(asyncio.wait_for(coroutine, 60))


async def turns():
    """Let tasks that are ready go on."""
    for _ in range(10):
        await asyncio.sleep(0)


def outputs(result):
    return {
        each.request_id: (each.token_ids, each.logprobs, each.finish_reason) for each in result.completions
    }


def roll_out(runtime, groups):
    async def run():
        async with runtime:
            return await runtime.rollout(groups).wait()

    return play(run())


# What comes back.


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
            engine.finish("a/1#0@hand-0", 4)
            first = await anext(under_way)
            assert (first.request_id, first.token_ids, first.text) == ("a/1", [5, 6, 7, 8], None)
            assert sorted(engine.jobs) == ["a/0#0@hand-0", "a/2#0@hand-0"]
            engine.finish()
            engine.finish()
            assert under_way.unread() == under_way.result.completions[1:]
            with pytest.raises(StopAsyncIteration):
                await anext(under_way)

    play(run())


def test_a_completion_tells_its_chunks_and_instances(by_hand, hand, some_groups):
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


# The same tokens, whatever happens.

SIM = {
    "instances": 3,
    "kv_capacity_tokens": 8192,
    "max_model_tokens": 2048,
    "max_running": 32,
    "lengths": {"mean_tokens": 420.0, "cap_tokens": 1000},
}
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
    expected = roll_out(simulated(**_sim()), groups)
    assert expected.summary.tokens >= 100_000
    assert expected.summary.chunks == 320

    chunked = roll_out(simulated(divided(), **_sim()), groups)
    assert chunked.summary.chunks > 1600
    assert outputs(chunked) == outputs(expected)

    moved = roll_out(simulated(policies(splitter=Chunks(96), placer=Rotate()), **_sim()), groups)
    assert moved.summary.migrations > 700
    assert outputs(moved) == outputs(expected)

    for each in (None, divided()):
        shot = roll_out(simulated(each, **_sim(kill_at_s=KILLS)), groups)
        assert shot.summary.instances_lost == 3
        assert outputs(shot) == outputs(expected)


def _sim(**more):
    return msgspec.structs.asdict(msgspec.convert({**SIM, **more}, Settings))


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
    result = play(run(simulated(divided(), observers, **_sim(kill_at_s=kills))))
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


# Losses.


def test_a_lost_instance_s_chunks_go_on_elsewhere_from_their_last_finished_chunk(by_hand, hand, some_groups):
    x, y = hand("x"), hand("y")

    async def run():
        async with by_hand(x, y, policies=policies(splitter=Chunks(4))) as runtime:
            under_way = runtime.rollout(some_groups(1, 1))
            x.finish(tokens=4, stopped=False)
            assert list(x.jobs) == ["a/0#1@x"]
            x.die()
            assert list(y.jobs) == ["a/0#1@y"]
            assert y.jobs["a/0#1@y"].token_ids[4:] == [5, 6, 7, 8]
            await turns()
            assert x.starts == 2
            assert set(runtime.living) == {"x", "y"}
            y.finish(tokens=2)
            return await under_way.wait()

    result = play(run())
    assert result.completions[0].token_ids == [5, 6, 7, 8, 9, 10]
    assert result.completions[0].instances == ["x", "y"]
    assert result.summary.instances_lost == 1


def test_what_an_instance_works_without_is_logged_seen_and_counted_until_it_is_started_anew(
    by_hand, hand, some_groups
):
    class Complaining(hand):
        async def start(self, sink):
            info = await super().start(sink)
            if self.starts == 1:
                self.complain("no server")
            return info

    x, y = Complaining("x"), hand("y")
    recorder = Recorder()

    async def roll(runtime, *complaints):
        under_way = runtime.rollout(some_groups(1, 2))
        for reason in complaints:
            y.complain(reason)
        x.finish()
        y.finish()
        return (await under_way.wait()).summary.troubles

    async def run():
        async with by_hand(x, y, observers=[Slot("observer", "recorder", recorder)]) as runtime:
            counts = [await roll(runtime, "too slow"), await roll(runtime)]
            x.die()
            await turns()
            counts.append(await roll(runtime))
            y.die()
            await turns()
            return [*counts, await roll(runtime)]

    with structlog.testing.capture_logs() as logs:
        assert play(run()) == [{"drafting": 2}, {"drafting": 2}, {"drafting": 1}, {}]
    told = [each for each in recorder.seen if isinstance(each, InstanceTroubled)]
    assert [(each.instance_id, each.reason) for each in told] == [("x", "no server"), ("y", "too slow")]
    assert [each for each in logs if each["event"] == "instance_troubled"] == [
        {
            "event": "instance_troubled",
            "log_level": "warning",
            "instance": instance,
            "what": "drafting",
            "reason": reason,
            "log": "hand.log",
        }
        for instance, reason in (("x", "no server"), ("y", "too slow"))
    ]


def test_a_restarted_instance_takes_over_what_waits(by_hand, hand, some_groups):
    engine = hand()

    async def run():
        async with by_hand(engine) as runtime:
            under_way = runtime.rollout(some_groups(1, 1))
            engine.die()
            assert not runtime.living
            await turns()
            engine.finish(tokens=3)
            return await under_way.wait()

    assert play(run()).completions[0].token_ids == [5, 6, 7]


def test_when_no_instance_is_left_the_rollout_ends_and_keeps_what_has_finished(simulated, some_groups):
    async def run():
        seer = SeerTable(max_restarts=0)
        kills = [{"instance": f"sim-{number}", "at_s": 1.0} for number in range(3)]
        async with simulated(divided(), seer=seer, **_sim(kill_at_s=kills)) as runtime:
            under_way = runtime.rollout(some_groups(20, 4, 900))
            streamed = []
            with pytest.raises(EngineError, match=r"no instance is left.*what had finished is kept"):
                await read_all(under_way, streamed)
            return streamed, under_way.result

    async def read_all(under_way, into):
        async for completion in under_way:
            into.append(completion)

    streamed, result = play(run())
    assert 0 < len(streamed) < 80
    assert result.completions == streamed
    assert result.summary.instances_lost == 3


def test_an_instance_is_restarted_no_more_often_than_allowed(by_hand, hand, some_groups):
    engine = hand()

    async def run():
        async with by_hand(engine, max_restarts=2, restart_backoff_s=0.0) as runtime:
            under_way = runtime.rollout(some_groups(1, 1))
            for _ in range(3):
                engine.die()
                await turns()
            with pytest.raises(EngineError, match="none could be started again"):
                await anext(under_way)

    play(run())
    assert engine.starts == 3


class Stepped(RealClock):
    """A clock that stands still, and jumps when the test says so; waits are those of the real one."""

    time_s = 0.0

    def __init__(self):
        super().__init__()
        self.due = []

    def now(self):
        return self.time_s

    def call_at(self, when_s, callback):
        entry = (when_s, callback)
        self.due.append(entry)
        return lambda: entry in self.due and self.due.remove(entry)

    async def jump(self, seconds):
        self.time_s += seconds
        for entry in [entry for entry in self.due if entry[0] <= self.time_s]:
            self.due.remove(entry)
            entry[1]()
        await turns()


async def die_and_wait(engine, seconds):
    """Let an engine die, and see to it that its restart comes after so many seconds and no sooner."""
    starts, clock = engine.starts, engine.clock
    engine.die()
    await turns()
    if seconds:
        await clock.jump(seconds - 0.01)
        assert engine.starts == starts
        await clock.jump(0.01)
    assert engine.starts == starts + 1


@pytest.fixture
def stepped(hand, by_hand):
    """Return a function that makes engines on a stepped clock, and their runtime."""

    def make(*names, **seer):
        clock, engines = Stepped(), [hand(name) for name in names]
        for engine in engines:
            engine.clock = clock
        runtime = by_hand(*engines, **seer)
        runtime.fleet.clock = clock
        return runtime, engines

    return make


def test_an_instance_that_dies_now_and_then_is_started_again_for_ever(stepped, some_groups):
    runtime, [engine] = stepped("x", max_restarts=2, restart_window_s=600.0)

    async def run():
        async with runtime:
            for _ in range(20):  # iterations, with one loss in each
                under_way = runtime.rollout(some_groups(1, 1))
                await runtime.fleet.clock.jump(400.0)
                await die_and_wait(engine, 1.0 if engine.starts > 1 else 0.0)
                engine.finish()
                assert (await under_way.wait()).summary.instances_given_up == 0

    play(run())
    assert engine.starts == 21


def test_losses_in_a_row_are_mended_later_each_time_and_at_last_the_instance_is_given_up(
    stepped, some_groups
):
    recorder = Recorder()
    slots = [Slot("observer", "recorder", recorder)]
    runtime, [x, y] = stepped("x", "y", observers=slots, max_restarts=4, restart_backoff_s=2.0)

    async def run():
        async with runtime:
            for pause_s in (0.0, 2.0, 4.0, 8.0):
                await die_and_wait(x, pause_s)
            under_way = runtime.rollout(some_groups(1, 2))
            with structlog.testing.capture_logs() as logs:
                x.die()
            await turns()
            [given_up] = [each for each in recorder.seen if isinstance(each, InstanceGivenUp)]
            assert given_up == InstanceGivenUp("x", "the test killed it")
            assert runtime.fleet.given_up == {"x": "the test killed it"}
            y.finish()
            y.finish()
            summaries = [(await under_way.wait()).summary]
            under_way = runtime.rollout(some_groups(1, 1))
            y.finish()
            summaries.append((await under_way.wait()).summary)
            assert [(each.instances_lost, each.instances_given_up) for each in summaries] == [(1, 1), (0, 1)]
            return logs

    with structlog.testing.capture_logs() as logs:
        play(run())
    [entry] = [entry for entry in logs if entry["event"] == "instance_given_up"]
    assert (entry["log_level"], entry["instance"], entry["reason"]) == ("error", "x", "the test killed it")
    assert (entry["max_restarts"], entry["restart_window_s"]) == (4, 600.0)
    assert x.starts == 5


def test_time_spent_on_restarts_that_fail_slowly_gives_no_more_of_them(stepped, hand, some_groups):
    runtime, [engine] = stepped("x", max_restarts=3, restart_window_s=10.0, restart_backoff_s=0.0)
    began = engine.start

    async def slow(sink):
        if engine.starts:
            engine.starts += 1
            runtime.fleet.clock.time_s += 1000.0
            raise EngineError("the machine is too slow")
        return await began(sink)

    engine.start = slow

    async def run():
        async with runtime:
            under_way = runtime.rollout(some_groups(1, 1))
            engine.die()
            with pytest.raises(EngineError, match="none could be started again"):
                await under_way.wait()
            await runtime.use(Strategies(Policies()))
            with pytest.raises(EngineError, match="'x' for: the machine is too slow; look into its log"):
                runtime.rollout(some_groups(1, 1))

    play(run())
    assert engine.starts == 4


def test_a_restart_that_fails_is_tried_again_on_a_clean_table(by_hand, hand, some_groups):
    class Stubborn(hand):
        async def start(self, sink):
            info = await super().start(sink)
            if self.starts == 2:
                raise EngineError("the port is still taken")
            if self.starts == 3:
                raise OSError("so is the file")
            return info

    engine = Stubborn()

    async def run():
        async with by_hand(engine, restart_backoff_s=0.0) as runtime:
            under_way = runtime.rollout(some_groups(1, 1))
            engine.die()
            await turns()
            assert (engine.starts, engine.stops) == (4, 2)
            engine.finish()
            await under_way.wait()

    play(run())


def test_a_loss_between_two_rollouts_is_mended_before_the_next(by_hand, hand, some_groups):
    x, y = hand("x"), hand("y")

    async def run():
        async with by_hand(x, y) as runtime:
            x.die()
            x.sink.lost("x", "said twice")
            await turns()
            assert x.starts == 2
            under_way = runtime.rollout(some_groups(1, 2))
            assert len(x.jobs) == len(y.jobs) == 1
            x.finish()
            y.finish()
            assert (await under_way.wait()).summary.instances_lost == 0

    play(run())


def test_what_a_dead_instance_still_says_is_ignored(by_hand, hand, some_groups):
    x, y = hand("x"), hand("y")

    async def run():
        async with by_hand(x, y) as runtime:
            under_way = runtime.rollout(some_groups(1, 1))
            late = dict(x.jobs)
            x.die()
            x.jobs = late
            x.finish(tokens=9)
            y.finish(tokens=2)
            return await under_way.wait()

    assert play(run()).completions[0].token_ids == [5, 6]


# Failures of chunks, engines and plug-ins.


def test_a_failed_chunk_is_tried_again(by_hand, hand, some_groups):
    engine = hand()

    async def run():
        async with by_hand(engine, max_chunk_failures=1) as runtime:
            under_way = runtime.rollout(some_groups(1, 1))
            engine.fail()
            engine.finish(tokens=3)
            return await under_way.wait()

    (completion,) = play(run()).completions
    assert (completion.finish_reason, completion.token_ids) == ("stop", [5, 6, 7])


def test_a_request_whose_chunks_keep_failing_ends_with_what_it_has(by_hand, hand, some_groups):
    engine = hand()

    async def run():
        async with by_hand(engine, policies=policies(splitter=Chunks(2)), max_chunk_failures=1) as runtime:
            under_way = runtime.rollout(some_groups(1, 2))
            engine.finish("a/0#0@hand-0", 2, stopped=False)
            engine.fail("a/0#1@hand-0")
            engine.fail("a/0#1@hand-0")
            engine.finish("a/1#0@hand-0", 1)
            return await under_way.wait()

    first, second = play(run()).completions
    assert (first.request_id, first.finish_reason, first.token_ids) == ("a/0", "error", [5, 6])
    assert second.finish_reason == "stop"


def test_a_rollout_of_which_nothing_finished_but_in_an_error_fails_with_the_first_reason(
    by_hand, hand, some_groups
):
    engine = hand()

    async def run():
        async with by_hand(engine, max_chunk_failures=1) as runtime:
            under_way = runtime.rollout(some_groups(1, 2))
            for _ in range(4):
                engine.fail()
            first, second = [await anext(under_way), await anext(under_way)]
            with pytest.raises(
                EngineError, match=r"all 2 requests ended in an error, .* 'hand-0': out of luck"
            ):
                await anext(under_way)
            assert under_way.result.completions == [first, second]
            again = runtime.rollout(some_groups(1, 1))
            engine.finish()
            await again.wait()

    play(run())


def test_engines_are_heard_between_completions_that_are_ready(by_hand, hand, some_groups):
    engine, heard = hand(), []

    async def run():
        async with by_hand(engine) as runtime:
            under_way = runtime.rollout(some_groups(1, 4))
            for _ in range(4):
                engine.finish()
            loop = asyncio.get_running_loop()
            async for completion in under_way:
                assert len(heard) == completion.index
                loop.call_soon(heard.append, completion.index)

    play(run())
    assert heard == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("answer", "error", "facts"),
    [
        (
            {"tokens": 5, "stopped": False},
            TransitionError,
            ["'a/0'", "5 tokens for a chunk of 4", "engine broke"],
        ),
        ({"tokens": 0, "stopped": False}, TransitionError, ["'a/0'", "without a token", "'hand-0'"]),
        ({"tokens": 2, "logprobs": 3}, TransitionError, ["'hand-0'", "2 tokens but 3 log-probs"]),
        ({"version": 7}, WeightVersionError, ["'a/0#0@hand-0'", "weight version 7", "runs on 0"]),
    ],
)
def test_an_engine_that_breaks_the_contract_ends_the_rollout(
    by_hand, hand, some_groups, answer, error, facts
):
    engine = hand()

    async def run():
        async with by_hand(engine, policies=policies(splitter=Chunks(4))) as runtime:
            under_way = runtime.rollout(some_groups(1, 2))
            engine.finish(**answer)
            with pytest.raises(error) as caught:
                await under_way.wait()
            assert engine.aborted == ["a/1#0@hand-0"]
            with pytest.raises(SeerError, match=r"give the runtime fresh strategies with use\(\)"):
                runtime.rollout(some_groups(1, 1))
            await runtime.use(Strategies(Policies()))
            again = runtime.rollout(some_groups(1, 1))
            engine.finish()
            await again.wait()
            return str(caught.value)

    message = play(run())
    for fact in facts:
        assert fact in message


def test_an_answer_from_the_wrong_instance_ends_the_rollout(by_hand, hand, some_groups):
    x, y = hand("x"), hand("y")

    async def run():
        async with by_hand(x, y) as runtime:
            under_way = runtime.rollout(some_groups(1, 1))
            y.jobs = dict(x.jobs)
            y.finish()
            with pytest.raises(TransitionError, match="instance 'y' answered for request 'a/0'"):
                await under_way.wait()

    play(run())


def test_a_chunk_answered_twice_counts_once(by_hand, hand, some_groups):
    engine = hand()

    async def run():
        async with by_hand(engine) as runtime:
            under_way = runtime.rollout(some_groups(1, 2))
            jobs = dict(engine.jobs)
            engine.finish(tokens=2)
            engine.jobs = jobs
            engine.finish(tokens=3)
            engine.finish(tokens=1)
            return await under_way.wait()

    assert [each.token_ids for each in play(run()).completions] == [[5, 6], [5]]


def test_a_strategy_that_raises_in_a_decision_is_named_with_slot_and_request(simulated, some_groups):
    class Tired(Chunks):
        def split(self, request):
            if request.chunks == 2:
                raise RuntimeError("enough")
            return super().split(request)

    with pytest.raises(PluginError) as caught:
        roll_out(simulated(policies(splitter=Tired(16))), some_groups(2, 2, 600))
    for fact in ("plug-in 'mine'", "slot 'splitter'", "request 'a/", "RuntimeError: enough", "-p no:mine"):
        assert fact in str(caught.value)


def test_a_strategy_that_answers_nonsense_is_named_with_slot_and_request(simulated, some_groups):
    with pytest.raises(PluginError) as caught:
        roll_out(simulated(policies(splitter=Chunks(0))), some_groups(1, 1))
    for fact in ("plug-in 'mine', slot 'splitter' for request 'a/0'", "answered 0", "1 to 64"):
        assert fact in str(caught.value)


class Fragile:
    """It sees one chunk's end and raises at it."""

    def __init__(self):
        self.chunks = 0

    def observe(self, now, event, commands):
        if isinstance(event, ChunkFinished):
            self.chunks += 1
            raise KeyError("oh")


def test_an_observer_that_raises_is_left_out_and_the_rollout_goes_on(simulated, some_groups):
    fragile, recorder = Fragile(), Recorder()
    observers = [Slot("observer", "fragile", fragile), Slot("observer", "recorder", recorder)]
    with structlog.testing.capture_logs() as logs:
        result = roll_out(simulated(divided(), observers), some_groups(2, 2, 200))
    expected = roll_out(simulated(divided()), some_groups(2, 2, 200))
    assert outputs(result) == outputs(expected)
    assert fragile.chunks == 1
    assert sum(isinstance(event, ChunkFinished) for event in recorder.seen) == result.summary.chunks
    assert (result.summary.observers_left_out, expected.summary.observers_left_out) == (1, 0)
    [told] = [entry for entry in logs if entry["event"] == "observer_left_out"]
    line = Fragile.observe.__code__.co_firstlineno + 3
    assert told["plugin"] == "fragile"
    assert told["error"].startswith("KeyError: 'oh' at ")
    assert told["error"].endswith(f"test_runtime.py:{line}")


def test_in_debug_an_observer_that_raises_is_named(simulated, some_groups):
    observer = Slot("observer", "fragile", Fragile())
    with pytest.raises(
        PluginError,
        match=r"'fragile', slot 'observer': raised KeyError: 'oh' at \S*test_runtime.py:\d+;.*-p no:fragile",
    ):
        roll_out(simulated(observers=[observer], seer=SeerTable(debug=True)), some_groups(1, 1))


def test_an_observer_cannot_change_what_is_carried_out(simulated, some_groups):
    class Censor:
        def observe(self, now, event, commands):
            commands.clear()

    result = roll_out(simulated(observers=[Slot("observer", "censor", Censor())]), some_groups(2, 2))
    assert len(result.completions) == 4
    assert result.summary.observers_left_out == 1


class Meddler(FirstComeFirstServed):
    """It wears requests out by looking at them."""

    def peek(self):
        request = super().peek()
        if request is not None and request.remaining_tokens > 1:
            request.generated_tokens += 1
        return request


def test_a_request_that_a_plug_in_has_changed_does_not_end_short_without_a_word(simulated, some_groups):
    groups = some_groups(2, 2, 40)
    with pytest.raises(PluginError, match=r"'a/0' ended at its limit of 40 tokens with \d+: .* --debug"):
        roll_out(simulated(policies(prioritizer=Meddler(), splitter=Chunks(16))), groups)
    with pytest.raises(
        PluginError, match=r"'mine', slot 'prioritizer': peek\(\) changed .*'a/0' from 0 to 1"
    ):
        roll_out(simulated(policies(prioritizer=Meddler()), seer=SeerTable(debug=True)), groups)


class Server(Recorder):
    """An observer with a port, which nobody else can have meanwhile."""

    def __init__(self, port):
        super().__init__()
        self.port = port
        self.told = []

    async def start(self):
        self.told.append("start")
        self.socket = socket.socket()
        self.socket.bind(("127.0.0.1", self.port))
        self.port = self.socket.getsockname()[1]

    async def stop(self):
        self.told.append("stop")
        self.socket.close()


def test_an_observer_lives_from_before_the_engines_start_until_they_have_ended(simulated, some_groups):
    server = Server(0)

    async def run():
        runtime = simulated(observers=[Slot("observer", "server", server)])
        async with runtime:
            assert server.told == ["start"]
            assert [type(event) for event in server.seen] == [InstanceStarted] * 2
            await runtime.rollout(some_groups(1, 1)).wait()
            other = Server(server.port)
            await runtime.use(Strategies(Policies(), (Slot("observer", "other", other),)))
            assert (server.told, other.told) == (["start", "stop"], ["start"])
            assert [type(event) for event in other.seen] == [InstanceStarted] * 2
        await runtime.stop()
        assert (server.told, other.told) == (["start", "stop"], ["start", "stop"])

    play(run())


def test_a_runtime_that_was_never_entered_starts_no_observer(simulated):
    server = Server(0)

    async def run():
        runtime = simulated(observers=[Slot("observer", "server", server)])
        await runtime.use(Strategies(Policies(), (Slot("observer", "other", server),)))
        await runtime.stop()

    play(run())
    assert server.told == []


def test_an_observer_that_does_not_start_is_named_and_the_others_are_stopped(simulated):
    first = Server(0)

    class Late(Server):
        async def start(self):
            self.port = first.port
            await super().start()

    second = Late(0)
    observers = [Slot("observer", "first", first), Slot("observer", "second", second)]

    async def run():
        async with simulated(observers=observers):
            pass

    with pytest.raises(
        PluginError, match=r"'second', slot 'observer': raised OSError: .* at .*test_runtime.py:"
    ):
        play(run())
    assert (first.told, second.told) == (["start", "stop"], ["start"])
    second.socket.close()


def test_an_observer_that_does_not_stop_is_logged_and_the_others_are_stopped(simulated, some_groups):
    class Clinging(Server):
        async def stop(self):
            await super().stop()
            raise OSError("no")

    first, second = Server(0), Clinging(0)
    observers = [Slot("observer", "first", first), Slot("observer", "second", second)]
    with structlog.testing.capture_logs() as logs:
        roll_out(simulated(observers=observers), some_groups(1, 1))
    [told] = [entry for entry in logs if entry["event"] == "stop_failed"]
    assert (told["slot"], told["plugin"]) == ("observer", "second")
    assert first.told == second.told == ["start", "stop"]


# Aborts.


def test_an_aborted_request_keeps_what_it_has(by_hand, hand, some_groups):
    engine = hand(max_running=1)

    async def run():
        async with by_hand(engine, policies=policies(splitter=Chunks(4))) as runtime:
            under_way = runtime.rollout(some_groups(1, 3))
            engine.finish(tokens=4, stopped=False)
            under_way.abort_request("a/0")
            under_way.abort_request("a/2")
            under_way.abort_request("nobody")
            assert engine.aborted == ["a/0#1@hand-0"]
            engine.finish("a/1#0@hand-0~1", 2)
            return await under_way.wait()

    result = play(run())
    assert [(each.request_id, each.finish_reason, each.token_ids) for each in result.completions] == [
        ("a/0", "aborted", [5, 6, 7, 8]),
        ("a/2", "aborted", []),
        ("a/1", "stop", [5, 6]),
    ]


def test_an_aborted_rollout_leaves_the_engines_free_for_the_next(simulated, some_groups):
    async def run():
        async with simulated(divided()) as runtime:
            under_way = runtime.rollout(some_groups(8, 4, 600))
            first = await anext(under_way)
            given_up = await under_way.abort()
            whole = await runtime.rollout(some_groups(8, 4, 600)).wait()
            return first, given_up, whole

    first, given_up, whole = play(run())
    assert given_up.completions[0] == first
    assert len(given_up.completions) == len(whole.completions) == 32
    assert given_up.summary.finish_reasons["aborted"] > 16
    complete = outputs(whole)
    for completion in given_up.completions:
        tokens = complete[completion.request_id][0]
        assert completion.token_ids == tokens[: len(completion.token_ids)]


# Weights.


def test_every_completion_and_chunk_carries_the_weight_version(simulated, some_groups):
    async def run():
        async with simulated(divided()) as runtime:
            old = await runtime.rollout(some_groups(2)).wait()
            assert await runtime.update_weights("step 1") == 1
            return old, await runtime.rollout(some_groups(2)).wait()

    for version, result in enumerate(play(run())):
        assert result.summary.weight_version == version
        assert {each.weight_version for each in result.completions} == {version}
        assert {chunk.weight_version for each in result.completions for chunk in each.chunks} == {version}


def test_weights_cannot_change_while_a_rollout_is_under_way(by_hand, hand, some_groups):
    engine = hand()

    async def run():
        async with by_hand(engine) as runtime:
            under_way = runtime.rollout(some_groups(1, 1))
            with pytest.raises(
                WeightVersionError, match="cannot update weights while a rollout is under way"
            ):
                await runtime.update_weights("step 1")
            with pytest.raises(SeerError, match="cannot start another rollout"):
                runtime.rollout(some_groups(1, 1))
            with pytest.raises(SeerError, match="cannot change the strategies"):
                await runtime.use(Strategies(Policies()))
            with pytest.raises(SeerError, match="cannot reset caches"):
                await runtime.reset_caches()
            assert (engine.weights, runtime.weight_version) == ([], 0)
            engine.finish()
            await under_way.wait()
            await runtime.update_weights("step 1")
            await runtime.reset_caches()
            assert (engine.weights, engine.resets) == ([("step 1", 1)], 1)

    play(run())


def test_a_restarted_instance_gets_the_weights_of_the_day(by_hand, hand, some_groups):
    x, y = hand("x"), hand("y")

    async def run():
        async with by_hand(x, y) as runtime:
            await runtime.update_weights("step 1")
            x.die()
            await turns()
            assert "x" in runtime.living

    play(run())
    assert x.weights == [("step 1", 1), ("step 1", 1)]
    assert y.weights == [("step 1", 1)]


class Picky:
    """An engine's share in a test of updates that fail: it takes no weights called ``bad``."""

    async def update_weights(self, source, version):
        if str(source) == self.bad:
            raise EngineError(f"no tensor in {source}")
        await super().update_weights(source, version)


def test_an_instance_that_cannot_load_the_weights_comes_back_with_them(by_hand, hand, some_groups):
    class Flaky(Picky, hand):
        bad = "step 1"

        async def start(self, sink):
            if self.starts:
                self.bad = None
            return await super().start(sink)

    x, y = hand("x"), Flaky("y")

    async def run():
        async with by_hand(x, y) as runtime:
            assert await runtime.update_weights("step 1") == 1
            assert set(runtime.living) == {"x"}
            await turns()
            assert set(runtime.living) == {"x", "y"}

    play(run())
    assert y.weights == [("step 1", 1)]


def test_weights_that_nobody_can_load_change_nothing(by_hand, hand, some_groups):
    class Refusing(Picky, hand):
        bad = "step 1"

    engine = Refusing()

    async def run():
        async with by_hand(engine) as runtime:
            with pytest.raises(
                EngineError, match="no instance could load the weights in 'step 1': no tensor"
            ):
                await runtime.update_weights("step 1")
            assert runtime.weight_version == 0
            assert await runtime.update_weights("step 2") == 1

    play(run())


# Start and end.


def test_engines_start_together_and_if_one_cannot_all_are_stopped(by_hand, hand):
    class Broken(hand):
        async def start(self, sink):
            raise EngineError("instance 'y' found no GPU; free one")

    x, y = hand("x"), Broken("y")
    with pytest.raises(EngineError, match="found no GPU"):
        play(by_hand(x, y).start())
    assert (x.starts, x.stops, y.stops) == (1, 1, 1)


@pytest.mark.parametrize(
    ("answer", "fact"),
    [
        (RuntimeError("libcuda is gone"), "instance 'x' did not start: RuntimeError: libcuda is gone"),
        (None, "instance 'x' answered its start with None"),
        (InstanceInfo("z", 64, 16, 4, 64), "instance 'x' answered its start with InstanceInfo(id='z'"),
    ],
)
def test_an_engine_that_breaks_the_contract_of_its_start_is_named(by_hand, hand, answer, fact):
    class Odd(hand):
        async def start(self, sink):
            if isinstance(answer, Exception):
                raise answer
            return answer

    engine = Odd("x")
    with pytest.raises(EngineError) as caught:
        play(by_hand(engine).start())
    assert fact in str(caught.value)
    assert engine.stops == 1


def test_a_start_that_is_interrupted_stops_what_is_up_already(by_hand, hand):
    class Slow(hand):
        async def start(self, sink):
            await asyncio.Event().wait()

    x, y = hand("x"), Slow("y")

    async def run():
        start = asyncio.ensure_future(by_hand(x, y).start())
        await turns()
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start

    play(run())
    assert (x.starts, x.stops, y.stops) == (1, 1, 1)


def test_an_instance_that_dies_while_others_start_is_started_again(by_hand, hand):
    class Dying(hand):
        async def start(self, sink):
            info = await super().start(sink)
            if self.starts == 1:
                asyncio.get_running_loop().call_soon(self.die)
            return info

    class Slow(hand):
        async def start(self, sink):
            await turns()
            return await super().start(sink)

    x, y = Dying("x"), Slow("y")
    recorder = Recorder()

    async def run():
        async with by_hand(x, y, observers=[Slot("observer", "recorder", recorder)]) as runtime:
            await turns()
            assert set(runtime.living) == {"x", "y"}

    play(run())
    assert x.starts == 2
    assert InstanceLost("x", "the test killed it") in recorder.seen


def test_a_runtime_can_be_entered_again_and_goes_on_where_it_was(simulated, some_groups, tmp_path):
    trace = TraceWriter(tmp_path / "trace.jsonl")
    runtime = simulated(divided(), [Slot("observer", "trace", trace)])

    async def run():
        results = []
        for version in range(3):
            async with runtime:
                results.append(await runtime.rollout(some_groups(6, 4, 600)).wait())
                assert await runtime.update_weights(f"step {version}") == version + 1
        return results

    first, *others = play(run())
    trace.close()
    for version, result in enumerate(others, 1):
        assert outputs(result) == outputs(first)
        assert result.summary.weight_version == version
    assert replay(tmp_path / "trace.jsonl", Scheduler(divided())) > 0


def test_a_runtime_that_is_up_is_not_started_twice(by_hand, hand, some_groups):
    engine = hand()

    async def run():
        async with by_hand(engine) as runtime:
            with pytest.raises(SeerError, match="started already; stop it before it can start again"):
                await runtime.start()
            under_way = runtime.rollout(some_groups(1, 1))
            engine.finish()
            await under_way.wait()

    play(run())
    assert (engine.starts, engine.stops) == (1, 1)


def test_a_runtime_left_in_mid_rollout_is_refused_before_its_engines_start(by_hand, hand, some_groups):
    engine = hand()
    runtime = by_hand(engine)

    async def run():
        async with runtime:
            runtime.rollout(some_groups(1, 1))
        with pytest.raises(SeerError, match=r"fresh strategies with use\(\)"):
            await runtime.start()
        assert engine.starts == 1
        await runtime.use(Strategies(Policies()))
        async with runtime:
            under_way = runtime.rollout(some_groups(1, 1))
            engine.finish()
            await under_way.wait()

    play(run())
    assert engine.starts == 2


def test_a_start_that_failed_can_be_tried_again(by_hand, hand, some_groups):
    class Late(hand):
        async def start(self, sink):
            info = await super().start(sink)
            if self.starts == 1:
                raise EngineError("no memory yet")
            return info

    x, y = hand("x"), Late("y")
    runtime = by_hand(x, y)

    async def run():
        with pytest.raises(EngineError, match="no memory yet"):
            await runtime.start()
        async with runtime:
            assert set(runtime.living) == {"x", "y"}

    play(run())


def test_the_short_form_is_refused_where_a_loop_runs_before_anything_is_made(write_config):
    path = write_config()

    async def run():
        rollout(path, [{"prompt": "hi"}])

    with pytest.raises(SeerError, match="one is running here already; use `async with Runtime"):
        play(run())


def test_a_pool_without_engines_is_refused(by_hand):
    with pytest.raises(EngineError, match="made no engines; set its `instances` to 1 or more"):
        play(by_hand().start())


def test_leaving_ends_a_rollout_that_is_under_way_and_all_engines(by_hand, hand, some_groups):
    x, y = hand("x"), hand("y")

    async def run():
        async with by_hand(x, y) as runtime:
            under_way = runtime.rollout(some_groups(1, 2))
            x.finish()
        assert (await anext(under_way)).request_id == "a/0"
        with pytest.raises(EngineError, match="stopped before the rollout had finished"):
            await anext(under_way)
        await runtime.stop()

    play(run())
    assert (x.stops, y.stops) == (2, 2)
    assert y.aborted == ["a/1#0@y"]


def test_an_instance_lost_while_others_are_stopped_is_not_started_again(by_hand, hand, some_groups):
    class Last(hand):
        async def stop(self):
            await super().stop()
            x.die()

    x, y = hand("x"), Last("y")

    async def run():
        async with by_hand(x, y):
            pass
        await turns()

    play(run())
    assert (x.starts, y.starts) == (1, 1)


def test_a_runtime_that_has_not_started_rolls_nothing_out(by_hand, hand, some_groups):
    async def run():
        with pytest.raises(EngineError, match="no instance is alive; enter the runtime before rolling out"):
            by_hand(hand()).rollout(some_groups(1, 1))

    play(run())


def test_groups_that_do_not_fit_are_refused_before_anything_runs(by_hand, hand, some_groups):
    engine = hand(kv_capacity_tokens=128)
    good, other = some_groups(2)
    bad = {
        "'a': this id occurs twice": [good, good],
        "'b': the prompt is empty": [good, msgspec.structs.replace(other, prompt_token_ids=())],
        "'b': n is 0": [good, msgspec.structs.replace(other, n=0)],
        "'b': token id 1000 is outside": [good, msgspec.structs.replace(other, prompt_token_ids=(1000,))],
        "'b': prompt and max_tokens make 205 tokens, the largest instance's KV holds 128": [
            good,
            msgspec.structs.replace(other, max_tokens=200),
        ],
        "'b': prompt (5) and max_tokens (512) exceed the model's 512": [
            good,
            msgspec.structs.replace(other, max_tokens=512),
        ],
    }

    async def run():
        async with by_hand(engine) as runtime:
            for fact, groups in bad.items():
                with pytest.raises(PromptError) as caught:
                    runtime.rollout(groups)
                assert f"group {fact}" in str(caught.value)
            assert not engine.jobs
            good_one = runtime.rollout([good])
            assert len(engine.jobs) == 2
            await good_one.abort()

    play(run())


def test_the_log_says_which_lengths_of_chunks_were_chosen(by_hand, hand):
    async def run():
        runtime = by_hand(hand(), policies=policies(splitter=AffordableChunks()))
        with structlog.testing.capture_logs() as logs:
            await runtime.start()
            await runtime.use(Strategies(divided(32)))
        await runtime.stop()
        return [entry for entry in logs if entry["event"] == "chunk_tokens"]

    chosen, given = play(run())
    assert re.match(r"\d+ after 0, \d+ after 1024, .* by what a chunk's end costs", chosen["why"])
    assert given["why"] == "32 tokens, as configured"


def test_a_chunk_larger_than_an_instance_s_kv_is_refused_at_the_start(by_hand, hand):
    engine = hand(kv_capacity_tokens=128)
    with pytest.raises(ConfigError) as caught:
        play(by_hand(engine, policies=divided(256)).start())
    assert engine.stops == 1
    for fact in ("[plugin.divided_rollout].chunk_tokens is 256", "'hand-0' holds 128", "smaller"):
        assert fact in str(caught.value)
