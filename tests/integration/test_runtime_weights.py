"""Weights of a runtime: versions, updates, and instances that cannot load them."""

import asyncio

import pytest

from seer_core.errors import (
    EngineError,
    SeerError,
    WeightVersionError,
)
from seer_core.plugins.slots import Strategies
from seer_core.scheduling.scheduler import Policies

from .helpers import divided, play, turns


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
            assert "x" in runtime.alive

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
    back = asyncio.Event()

    class Flaky(Picky, hand):
        bad = "step 1"

        async def start(self, sink):
            if self.starts:
                await back.wait()
                self.bad = None
            return await super().start(sink)

    x, y = hand("x"), Flaky("y")

    async def run():
        async with by_hand(x, y) as runtime:
            assert await runtime.update_weights("step 1") == 1
            assert set(runtime.alive) == {"x"}
            back.set()
            await turns()
            assert set(runtime.alive) == {"x", "y"}

    play(run())
    assert y.weights == [("step 1", 1)]


def test_weights_that_no_instance_can_load_change_nothing(by_hand, hand, some_groups):
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


def test_an_update_that_is_cancelled_comes_to_its_end_first(by_hand, hand, some_groups):
    go_on = asyncio.Event()

    class Slow(type(hand())):
        async def update_weights(self, source, version):
            await go_on.wait()
            await super().update_weights(source, version)

    x, y = Slow("x"), hand("y")

    async def run():
        async with by_hand(x, y) as runtime:
            update = asyncio.ensure_future(runtime.update_weights("step 1"))
            await turns()
            update.cancel()
            await turns()
            assert not update.done()
            with pytest.raises(SeerError, match="while weights are being updated"):
                runtime.rollout(some_groups(1, 1))
            go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await update
            assert runtime.weight_version == 1
            assert x.weights == y.weights == [("step 1", 1)]
            rollout = runtime.rollout(some_groups(1, 1))
            x.finish() if x.jobs else y.finish()
            assert (await anext(rollout)).finish_reason == "stop"
            await runtime.update_weights("step 2")
            assert runtime.weight_version == 2

    play(run())
