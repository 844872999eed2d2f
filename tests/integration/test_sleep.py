"""Instances that give their memory back between two rollouts, and take it again."""

import asyncio
import signal
import threading

import pytest
from seer_session import Session

from seer_core.errors import EngineError, SeerError
from seer_core.plugins.slots import Strategies
from seer_core.scheduling.scheduler import Policies

from .helpers import RECORDS, SMALL, play, tokens, turns


def test_a_session_s_engines_sleep_while_it_trains_and_roll_out_as_ever_afterwards(write_config):
    with Session(write_config(["divided_rollout"], SMALL)) as session:
        first = session.rollout(RECORDS)
        assert session.sleep() > 0
        assert session.sleep() == 0
        session.wake()
        session.wake()
        again = session.rollout(RECORDS, iteration=0)
        session.sleep()
        session.wake()
        assert session.update_weights("step 1") == 1
        assert session.rollout(RECORDS).summary.weight_version == 1
        session.sleep()  # and leave
    assert tokens(first.completions) == tokens(again.completions)


def test_instances_sleep_only_between_rollouts_and_do_nothing_else_asleep(by_hand, hand, some_groups):
    x, y = hand("x"), hand("y")

    async def run():
        async with by_hand(x, y) as runtime:
            under_way = runtime.rollout(some_groups(1, 1))
            with pytest.raises(SeerError, match="cannot put the instances to sleep while a rollout is under"):
                await runtime.sleep()
            x.finish()
            await under_way.wait()
            assert await runtime.sleep() == 2000
            assert await runtime.sleep() == 0
            asleep = "while the instances are asleep; wake them first"
            with pytest.raises(SeerError, match=f"cannot start another rollout {asleep}"):
                runtime.rollout(some_groups(1, 1))
            with pytest.raises(SeerError, match=f"cannot update weights {asleep}"):
                await runtime.update_weights("step 1")
            with pytest.raises(SeerError, match=f"cannot reset caches {asleep}"):
                await runtime.reset_caches()
            with pytest.raises(SeerError, match=f"cannot change the strategies {asleep}"):
                await runtime.use(Strategies(Policies()))
            with pytest.raises(EngineError, match="asleep; wake them before 'z' joins them"):
                await runtime.add(hand("z"))
            await runtime.wake()
            await runtime.wake()
            assert await runtime.update_weights("step 1") == 1
        assert (x.slept, y.slept, x.woken, y.woken, x.resets) == (1, 1, 1, 1, 0)

    play(run())


def test_an_instance_lost_asleep_leaves_the_memory_alone_until_the_others_wake(by_hand, hand):
    x, y = hand("x"), hand("y")

    async def run():
        async with by_hand(x, y) as runtime:
            await runtime.update_weights("step 1")
            await runtime.sleep()
            y.die()
            await turns()
            assert y.starts == 1
            await runtime.wake()
            await turns()
            assert set(runtime.alive) == {"x", "y"}
            assert (y.starts, y.woken, y.weights[-1]) == (2, 0, ("step 1", 1))

    play(run())


def test_an_instance_that_dies_falling_asleep_keeps_no_other_awake(by_hand, hand):
    class Frail(hand):
        async def sleep(self):
            self.die()
            raise EngineError("it died")

    x, y = hand("x"), Frail("y")

    async def run():
        async with by_hand(x, y) as runtime:
            assert await runtime.sleep() == 1000
            await turns()
            assert y.starts == 1
            await runtime.wake()
            await turns()
            assert set(runtime.alive) == {"x", "y"}

    play(run())


def test_if_one_refuses_to_sleep_all_are_awake(by_hand, hand, some_groups):
    class Sleepless(hand):
        async def sleep(self):
            raise EngineError("Sleep on instance 'y': set enable_sleep_mode")

    x, y = hand("x"), Sleepless("y")

    async def run():
        async with by_hand(x, y) as runtime:
            with pytest.raises(EngineError, match=r"the instances stay awake: .* 'y': set enable_sleep_mode"):
                await runtime.sleep()
            assert (x.slept, x.woken) == (1, 1)
            under_way = runtime.rollout(some_groups(1, 1))
            x.finish()
            assert (await under_way.wait()).summary.requests == 1

    play(run())


def test_an_instance_that_does_not_wake_starts_again(by_hand, hand):
    class Heavy(hand):
        async def wake(self):
            raise EngineError("out of memory")

    x, y = hand("x"), Heavy("y")

    async def run():
        async with by_hand(x, y) as runtime:
            await runtime.sleep()
            await runtime.wake()
            await turns()
            assert set(runtime.alive) == {"x", "y"}
            assert (y.stops, y.starts) == (1, 2)

    play(run())


def test_the_runtime_stops_and_starts_again_while_some_sleep_and_some_are_lost(by_hand, hand, some_groups):
    x, y = hand("x"), hand("y")

    async def run():
        runtime = by_hand(x, y)
        async with runtime:
            await runtime.sleep()
            y.die()
            await turns()
        async with runtime:
            under_way = runtime.rollout(some_groups(1, 1))
            x.finish()
            await under_way.wait()
        assert (x.starts, y.starts) == (2, 2)

    play(run())


def test_no_instance_sleeps_while_one_is_being_added(by_hand, hand, slow_starter):
    async def run():
        async with by_hand(hand("x")) as runtime:
            adding = asyncio.ensure_future(runtime.add(slow_starter))
            await turns()
            with pytest.raises(EngineError, match="an instance is being added"):
                await runtime.sleep()
            slow_starter.go_on.set()
            await adding
            assert await runtime.sleep() == 2000

    play(run())


def test_ctrl_c_takes_effect_once_all_sleep(write_config, by_hand, hand):
    class Interrupting(hand):
        async def sleep(self):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            await asyncio.sleep(0)
            return await super().sleep()

    engine = Interrupting()
    session = Session(write_config())
    session.runtime = by_hand(engine)
    with session:
        with pytest.raises(KeyboardInterrupt):
            session.sleep()
        assert engine.slept == 1
        with pytest.raises(SeerError, match="asleep"):
            session.update_weights("step 1")
