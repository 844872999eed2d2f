"""The fleet: instances come and go while a rollout runs, and the tokens stay what they are."""

import asyncio
import sys

import msgspec
import pytest
import structlog
from seer_divided_rollout import Chunks

from seer_core.errors import EngineError, SeerError
from seer_core.model.events import InstanceLost, InstanceStarted, InstanceStopped
from seer_core.scheduling.scheduler import Policies, Slot
from tests.support.eventually import PATIENCE_S


class Recorder:
    def __init__(self):
        self.seen = []

    def observe(self, now, event, commands):
        self.seen.append(event)


def pieces(tokens):
    return Policies(splitter=Slot("splitter", "test", Chunks(tokens)))


def play(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, PATIENCE_S))


async def turns():
    for _ in range(10):
        await asyncio.sleep(0)


def test_an_instance_added_while_a_rollout_runs_takes_what_waits(by_hand, hand, some_groups):
    x, y = hand("x", max_running=1), hand("y")

    async def run():
        async with by_hand(x) as runtime:
            under_way = runtime.rollout(some_groups(1, 3))
            assert list(x.jobs) == ["a/0#0@x"]
            assert (await runtime.add(y)).id == "y"
            assert set(runtime.alive) == {"x", "y"}
            assert list(y.jobs) == ["a/1#1@y", "a/2#2@y"]
            x.finish()
            y.finish()
            y.finish()
            return await under_way.wait()

    assert play(run()).summary.requests == 3
    assert (x.stops, y.stops) == (1, 1)


def test_an_instance_added_later_comes_with_the_weights_of_the_day(by_hand, hand):
    x, y = hand("x"), hand("y")

    async def run():
        async with by_hand(x) as runtime:
            await runtime.update_weights("step 1")
            await runtime.add(y)
            assert y.weights == [("step 1", 1)]
            await runtime.update_weights("step 2")
            assert (x.weights[-1], y.weights[-1]) == (("step 2", 2), ("step 2", 2))

    play(run())


def test_an_instance_whose_id_is_taken_or_that_does_not_start_is_not_added(by_hand, hand):
    class Broken(hand):
        async def start(self, sink):
            raise OSError("no more memory")

    broken = Broken("y")

    async def run():
        runtime = by_hand(hand("x"))
        with pytest.raises(SeerError, match="has not been started"):
            await runtime.add(hand("y"))
        async with runtime:
            with pytest.raises(EngineError, match="there is an instance 'x' already"):
                await runtime.add(hand("x"))
            with pytest.raises(EngineError, match="'y' did not start: OSError: no more memory"):
                await runtime.add(broken)
            assert set(runtime.alive) == set(runtime.engines) == {"x"}

    play(run())
    assert broken.stops == 1


def test_an_instance_of_another_model_is_not_added(by_hand, hand):
    x, same, other = hand("x"), hand("y"), hand("z")
    for engine, files in ((x, "one"), (same, "one"), (other, "two")):
        engine.info = msgspec.structs.replace(engine.info, model=files)

    async def run():
        async with by_hand(x) as runtime:
            runtime._fleet._made.model = msgspec.structs.replace(runtime.model, digest="one")
            await runtime.add(same)
            with pytest.raises(EngineError, match="'z' has other model files than the prompts are made for"):
                await runtime.add(other)
            assert set(runtime.alive) == {"x", "y"}

    play(run())
    assert other.stops == 1


def test_an_instance_that_ends_responses_with_other_tokens_is_not_added(by_hand, hand):
    w, x, same, other = hand("w"), hand("x"), hand("y"), hand("z")
    for engine, ends in ((x, (2, 7)), (same, (2, 7)), (other, (2,))):
        engine.info = msgspec.structs.replace(engine.info, end_token_ids=ends)

    async def run():
        async with by_hand(w, x) as runtime:  # of w the tokens are not known
            await runtime.add(same)
            with pytest.raises(
                EngineError,
                match=r"'z' ends a response with the tokens \[2\], and others with \[2, 7\]; give",
            ):
                await runtime.add(other)
            assert set(runtime.alive) == {"w", "x", "y"}

    play(run())


def test_an_instance_that_is_still_starting_when_the_runtime_stops_is_stopped_too(
    by_hand, hand, slow_starter
):
    async def run():
        async with by_hand(hand("x")) as runtime:
            adding = asyncio.ensure_future(runtime.add(slow_starter))
            await turns()
        slow_starter.go_on.set()
        with pytest.raises(EngineError, match="'y' was taken away before it had started"):
            await adding
        assert not runtime.alive

    play(run())
    assert slow_starter.stops == 2


def test_a_removed_instance_s_chunks_go_on_elsewhere_and_it_does_not_come_back(by_hand, hand, some_groups):
    x, y, recorder = hand("x"), hand("y"), Recorder()
    observers = [Slot("observer", "recorder", recorder)]

    async def run():
        async with by_hand(x, y, policies=pieces(4), observers=observers) as runtime:
            under_way = runtime.rollout(some_groups(1, 1))
            x.finish(tokens=4, stopped=False)
            assert list(x.jobs) == ["a/0#1@x"]
            late = dict(x.jobs)
            await runtime.remove("x")
            assert y.jobs["a/0#2@y"].token_ids[4:] == [5, 6, 7, 8]
            x.jobs = late
            x.finish(tokens=3)
            x.die()
            await turns()
            assert set(runtime.alive) == {"y"}
            y.finish(tokens=2)
            return await under_way.wait()

    result = play(run())
    assert result.completions[0].token_ids == [5, 6, 7, 8, 9, 10]
    assert result.summary.instances_lost == 0
    assert (x.starts, x.stops) == (1, 1)
    changes = [each for each in recorder.seen if isinstance(each, InstanceStarted | InstanceStopped)]
    assert InstanceStopped("x") in changes
    assert not any(isinstance(each, InstanceLost) for each in recorder.seen)


def test_removing_the_last_instance_ends_the_rollout_and_an_unknown_one_is_refused(
    by_hand, hand, some_groups
):
    async def run():
        async with by_hand(hand("x")) as runtime:
            under_way = runtime.rollout(some_groups(1, 1))
            with pytest.raises(EngineError, match="there is no instance 'y'; there are x"):
                await runtime.remove("y")
            with structlog.testing.capture_logs() as logs:
                await runtime.remove("x")
            assert {"event": "instance_removed", "log_level": "info", "instance": "x"} in logs
            with pytest.raises(EngineError, match="no instance is left"):
                await under_way.wait()

    play(run())


def test_an_instance_that_is_being_started_again_can_be_removed(by_hand, hand, some_groups):
    class Slow(hand):
        async def start(self, sink):
            if self.starts:
                await asyncio.Event().wait()
            return await super().start(sink)

    x, y = Slow("x"), hand("y")

    async def run():
        async with by_hand(x, y) as runtime:
            under_way = runtime.rollout(some_groups(1, 1))
            x.die()
            await turns()
            assert runtime._fleet._restarts
            await runtime.remove("x")
            assert not runtime._fleet._restarts
            y.finish()
            await under_way.wait()

    play(run())
    assert x.stops == 1


def test_a_completion_that_has_been_read_can_be_let_go(by_hand, hand, some_groups):
    engine = hand()

    async def run():
        async with by_hand(engine) as runtime:
            under_way = runtime.rollout(some_groups(1, 3), keep=False)
            for _ in range(3):
                engine.finish(tokens=2)
            first = await anext(under_way)
            assert first.token_ids == [5, 6]
            gone = sys.getrefcount(first)
            assert [each.index for each in under_way.result.completions] == [1, 2]
            assert gone == 2  # this frame's, and the call's
            summary = (await under_way.wait()).summary
            assert (summary.requests, summary.tokens) == (3, 6)

    play(run())
