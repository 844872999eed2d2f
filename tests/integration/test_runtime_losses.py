"""Instances of a runtime that are lost: their chunks go on elsewhere, and they start again."""

import asyncio

import msgspec
import pytest
import structlog
from seer_divided_rollout import Chunks
from seer_host.tables import SeerTable

from seer_core.errors import (
    EngineError,
    NoPlaceError,
)
from seer_core.model.events import (
    InstanceDegraded,
    InstanceFailed,
    InstanceWaiting,
)
from seer_core.plugins.slots import Strategies
from seer_core.ports.clock import RealClock
from seer_core.runtime.restarts import RestartsTable
from seer_core.scheduling.defaults import LeastLoaded
from seer_core.scheduling.scheduler import Policies, Slot

from .helpers import SIM, Recorder, divided, play, policies, turns


def test_a_lost_instance_s_chunks_go_on_elsewhere_from_their_last_finished_chunk(by_hand, hand, some_groups):
    x, y = hand("x"), hand("y")

    async def run():
        async with by_hand(x, y, policies=policies(splitter=Chunks(4))) as runtime:
            under_way = runtime.rollout(some_groups(1, 1))
            x.finish(tokens=4, stopped=False)
            assert list(x.jobs) == ["a/0#1@x"]
            x.die()
            assert list(y.jobs) == ["a/0#2@y"]
            assert y.jobs["a/0#2@y"].token_ids[4:] == [5, 6, 7, 8]
            await turns()
            assert x.starts == 2
            assert set(runtime.alive) == {"x", "y"}
            y.finish(tokens=2)
            return await under_way.wait()

    result = play(run())
    assert result.completions[0].token_ids == [5, 6, 7, 8, 9, 10]
    assert result.completions[0].instances == ["x", "y"]
    assert result.summary.instances_lost == 1


def test_failed_parts_of_an_instance_are_logged_shown_and_counted_until_it_is_started_anew(
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
        return (await under_way.wait()).summary.degradations

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
    seen = [each for each in recorder.seen if isinstance(each, InstanceDegraded)]
    assert [(each.instance_id, each.reason) for each in seen] == [("x", "no server"), ("y", "too slow")]
    assert [each for each in logs if each["event"] == "instance_degraded"] == [
        {
            "event": "instance_degraded",
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
            assert not runtime.alive
            await turns()
            engine.finish(tokens=3)
            return await under_way.wait()

    assert play(run()).completions[0].token_ids == [5, 6, 7]


def test_an_instance_that_dies_as_it_comes_back_is_started_once_more(by_hand, hand, some_groups):
    class DyingAgain(hand):
        async def start(self, sink):
            self.jobs.clear()
            info = await super().start(sink)
            if self.starts == 2:
                self.die()
            return info

    engine = DyingAgain()

    async def run():
        async with by_hand(engine, restarts=RestartsTable(backoff_s=0.0)) as runtime:
            under_way = runtime.rollout(some_groups(1, 1))
            engine.die()
            await turns(20)
            assert engine.starts == 3
            engine.finish(tokens=3)
            return await under_way.wait()

    result = play(run())
    assert result.completions[0].token_ids == [5, 6, 7]
    assert result.summary.instances_lost == 2


def test_when_no_instance_is_left_the_rollout_ends_and_keeps_what_has_finished(simulated, some_groups):
    async def run():
        seer = SeerTable(restarts=RestartsTable(attempts=0))
        kills = [{"instance": f"sim-{number}", "at_s": 1.0} for number in range(3)]
        async with simulated(divided(), seer=seer, **SIM, kill_at_s=kills) as runtime:
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
        async with by_hand(engine, restarts=RestartsTable(2, backoff_s=0.0)) as runtime:
            under_way = runtime.rollout(some_groups(1, 1))
            for _ in range(3):
                engine.die()
                await turns()
            with pytest.raises(EngineError, match="none could be started again"):
                await anext(under_way)

    play(run())
    assert engine.starts == 3


class Stepped(RealClock):
    """A clock that stands still, and jumps when the test moves it; it waits as the real one does."""

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
        runtime._fleet.clock = clock
        return runtime, engines

    return make


def test_an_instance_that_dies_now_and_then_is_started_again_for_ever(stepped, some_groups):
    runtime, [engine] = stepped("x", restarts=RestartsTable(2, window_s=600.0))

    async def run():
        async with runtime:
            for _ in range(20):  # iterations, with one loss in each
                under_way = runtime.rollout(some_groups(1, 1))
                await runtime._fleet.clock.jump(400.0)
                await die_and_wait(engine, 1.0 if engine.starts > 1 else 0.0)
                engine.finish()
                assert (await under_way.wait()).summary.instances_failed == 0

    play(run())
    assert engine.starts == 21


def test_pauses_double_between_restarts_and_at_last_the_instance_is_given_up(stepped, some_groups):
    recorder = Recorder()
    slots = [Slot("observer", "recorder", recorder)]
    runtime, [x, y] = stepped("x", "y", observers=slots, restarts=RestartsTable(4, backoff_s=2.0))

    async def run():
        async with runtime:
            for pause_s in (0.0, 2.0, 4.0, 8.0):
                await die_and_wait(x, pause_s)
            under_way = runtime.rollout(some_groups(1, 2))
            with structlog.testing.capture_logs() as logs:
                x.die()
            await turns()
            [failed] = [each for each in recorder.seen if isinstance(each, InstanceFailed)]
            assert failed == InstanceFailed("x", "the test killed it")
            assert runtime._fleet.failed == {"x": "the test killed it"}
            y.finish()
            y.finish()
            summaries = [(await under_way.wait()).summary]
            under_way = runtime.rollout(some_groups(1, 1))
            y.finish()
            summaries.append((await under_way.wait()).summary)
            assert [(each.instances_lost, each.instances_failed) for each in summaries] == [(1, 1), (0, 1)]
            return logs

    with structlog.testing.capture_logs() as logs:
        play(run())
    [entry] = [each for each in logs if each["event"] == "instance_failed"]
    assert (entry["log_level"], entry["instance"], entry["reason"]) == ("error", "x", "the test killed it")
    assert (entry["attempts"], entry["window_s"]) == (4, 600.0)
    assert x.starts == 5


def test_time_spent_on_restarts_that_fail_slowly_gives_no_more_of_them(stepped, hand, some_groups):
    runtime, [engine] = stepped("x", restarts=RestartsTable(3, window_s=10.0, backoff_s=0.0))
    began = engine.start

    async def slow(sink):
        if engine.starts:
            engine.starts += 1
            runtime._fleet.clock.time_s += 1000.0
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
        async with by_hand(engine, restarts=RestartsTable(backoff_s=0.0)) as runtime:
            under_way = runtime.rollout(some_groups(1, 1))
            engine.die()
            await turns()
            assert (engine.starts, engine.stops) == (4, 2)
            engine.finish()
            await under_way.wait()

    play(run())


@pytest.fixture
def homeless(hand):
    """An instance that waits for a place before it starts again."""

    class Homeless(hand):
        def __init__(self, name):
            super().__init__(name)
            self.place = asyncio.Event()

        async def find_place(self, waiting):
            waiting("1 GPU")
            await self.place.wait()

    return Homeless


def test_an_instance_without_a_place_holds_up_neither_weights_nor_sleep_nor_caches(by_hand, hand, homeless):
    x, y = homeless("x"), hand("y")

    async def run():
        async with by_hand(x, y) as runtime:
            x.die()
            await turns()
            assert x.starts == 1
            assert await runtime.update_weights("step 1") == 1
            await runtime.reset_caches()
            assert await runtime.sleep() > 0
            x.place.set()
            await turns()
            assert x.starts == 1, "its memory belongs to another program"
            await runtime.wake()
            await turns()
            assert (x.starts, x.weights) == (2, [("step 1", 1)])
            assert set(runtime.alive) == {"x", "y"}

    play(run())


def test_the_only_instance_is_waited_for_until_it_has_a_place(by_hand, homeless, some_groups):
    x, recorder = homeless("x"), Recorder()
    slots = [Slot("observer", "recorder", recorder)]

    async def run():
        async with by_hand(x, observers=slots, restarts=RestartsTable(attempts=1)) as runtime:
            under_way = runtime.rollout(some_groups(1, 1))
            x.die()
            await turns()
            assert recorder.seen[-1] == InstanceWaiting("x", "1 GPU")
            x.place.set()
            await turns()
            assert x.starts == 2
            x.finish()
            await under_way.wait()

    play(run())


def test_a_runtime_stops_while_an_instance_waits_for_a_place(by_hand, hand, homeless):
    x, y = homeless("x"), hand("y")

    async def run():
        async with by_hand(x, y):
            x.die()
            await turns()
        assert (x.starts, x.stops) == (1, 1)

    play(run())


def test_an_instance_lost_between_two_rollouts_is_back_before_the_next(by_hand, hand, some_groups):
    x, y = hand("x"), hand("y")

    async def run():
        async with by_hand(x, y) as runtime:
            x.die()
            x.sink.lost("x", "reported twice")
            await turns()
            assert x.starts == 2
            under_way = runtime.rollout(some_groups(1, 2))
            assert len(x.jobs) == len(y.jobs) == 1
            x.finish()
            y.finish()
            assert (await under_way.wait()).summary.instances_lost == 0

    play(run())


def test_late_messages_of_a_dead_instance_are_ignored(by_hand, hand, some_groups):
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


def test_an_instance_that_has_to_leave_gives_its_chunk_back_and_uses_up_no_restart(
    by_hand, hand, homeless, some_groups
):
    x, y = homeless("x"), hand("y")

    async def run():
        async with by_hand(x, y, restarts=RestartsTable(attempts=0)) as runtime:
            under_way = runtime.rollout(some_groups(1, 2))
            await turns()
            [job] = x.jobs.values()
            x.sink.leaving("x", "its node is being drained")
            await turns()
            assert set(runtime.alive) == {"y"}
            assert (x.starts, x.stops) == (1, 1)
            assert job.request_id in {each.request_id for each in y.jobs.values()}
            x.place.set()
            await turns()
            assert (x.starts, set(runtime.alive)) == (2, {"x", "y"})
            for each in list(y.jobs):
                y.finish(each)
            result = await under_way.wait()
            assert result.summary.instances_lost == 0

    play(run())


def test_a_run_begins_without_an_instance_that_may_wait_for_a_place(by_hand, hand, homeless):
    class Late(homeless):
        async def start(self, sink):
            if not self.place.is_set():
                raise NoPlaceError("no node has room")
            return await super().start(sink)

    x, y = Late("x"), hand("y")

    async def run():
        async with by_hand(x, y) as runtime:
            assert set(runtime.alive) == {"y"}
            assert await runtime.update_weights("step 1") == 1
            x.place.set()
            await turns()
            assert set(runtime.alive) == {"x", "y"}
            assert x.weights == [("step 1", 1)]

    play(run())


def test_a_run_whose_instances_all_have_no_place_does_not_begin(by_hand, homeless):
    class Placeless(homeless):
        async def start(self, sink):
            raise NoPlaceError("no node has room")

    async def run():
        with pytest.raises(NoPlaceError, match="no node has room"):
            await by_hand(Placeless("x"), Placeless("y")).start()

    play(run())


class WhereItsKvIs(LeastLoaded):
    """A placer that keeps requests where their KV is, and notes where that was."""

    def __init__(self):
        self.homes = []

    def place(self, request, chunk_tokens, instances):
        self.homes.append(request.instance)
        at_home = [each for each in instances if each.id == request.instance]
        return super().place(request, chunk_tokens, at_home or instances)


@pytest.mark.parametrize("how", ["lost", "given other weights", "emptied", "put to sleep"])
def test_a_trajectory_has_no_home_on_an_instance_that_has_forgotten_its_kv(by_hand, hand, some_groups, how):
    engine, placer = hand(), WhereItsKvIs()

    async def turn(runtime):
        [group] = some_groups(1, 1)
        rollout = runtime.rollout([msgspec.structs.replace(group, trajectories=("t",))])
        engine.finish(tokens=3)
        await rollout.wait()

    async def run():
        async with by_hand(
            engine, policies=policies(placer=placer), restarts=RestartsTable(backoff_s=0.0)
        ) as runtime:
            await turn(runtime)
            await turn(runtime)
            if how == "lost":
                engine.die()
                await turns(20)
            elif how == "given other weights":
                await runtime.update_weights("weights/1")
            elif how == "emptied":
                await runtime.reset_caches()
            else:
                await runtime.sleep()
                await runtime.wake()
            await turn(runtime)

    play(run())
    assert placer.homes == [None, engine.id, None]
