"""Instances over servers of another program: their losses, weights, descriptions, and how exact they are."""

import asyncio
from collections.abc import Awaitable, Callable

import attrs
import msgspec
import pytest
from seer_host.config_files import make_config
from seer_host.contract_checks import flaw_of
from seer_host.tables import SeerTable
from seer_session import Runtime
from seer_session.assembly import startup_of

from seer_core.errors import EngineError
from seer_core.model import Sampling
from seer_core.plugins.slots import Assembly, Strategies
from seer_core.ports.clock import RealClock
from seer_core.ports.engine import ChangingFleet, EngineFleet, ForeignInstance, ModelInfo
from seer_core.ports.weights import OWNER
from seer_core.runtime.restarts import RestartsTable
from seer_core.scheduling.scheduler import Policies
from tests.support.eventually import PATIENCE_S, aeventually


def play(story):
    return asyncio.run(asyncio.wait_for(story, PATIENCE_S))


@pytest.fixture
def foreign(hand):
    """Return a function that makes an instance over another program's server, which is away at times."""

    class Foreign(hand):
        address = "http://there"

        def __init__(self, id):
            super().__init__(id)
            self.there = asyncio.Event()
            self.there.set()

        async def find_place(self, waiting):
            waiting("the server is away")
            await self.there.wait()

    return Foreign


def test_losses_of_another_program_s_server_use_up_no_restart(by_hand, foreign):
    async def story():
        x = foreign("x")
        assert isinstance(x, ForeignInstance)
        async with by_hand(x, restarts=RestartsTable(attempts=0)) as runtime:
            for _ in range(3):
                x.die()
                assert not runtime.alive
                await aeventually(lambda: runtime.alive)
        return x.starts

    assert play(story()) == 4


def test_it_starts_again_once_its_server_is_back(by_hand, foreign):
    async def story():
        x, y = foreign("x"), foreign("y")
        async with by_hand(x, y) as runtime:
            x.there.clear()
            x.die()
            assert await runtime.update_weights("new") == 1  # which does not wait for it
            assert x.starts == 1
            x.there.set()
            await aeventually(lambda: set(runtime.alive) == {"x", "y"})
            return x.weights

    assert play(story()) == [("new", 1)]


def test_weights_of_the_owner_s_are_looked_at_and_not_loaded(by_hand, foreign):
    async def story():
        x, y = foreign("x"), foreign("y")
        async with by_hand(x, y) as runtime:
            assert await runtime.weights_changed(7) == 7
            x.die()
            await aeventually(lambda: len(runtime.alive) == 2)
            assert runtime.weight_version == 7
            return x.specs + y.specs

    specs = play(story())
    assert [spec.path for spec in specs] == [OWNER] * 3


def test_weights_of_the_owner_s_and_sleep_do_not_wait_for_servers_that_are_all_away(by_hand, foreign):
    async def story():
        x, y = foreign("x"), foreign("y")
        async with by_hand(x, y) as runtime:
            for each in (x, y):
                each.there.clear()
                each.die()
            await aeventually(lambda: len(runtime.places_missing) == 2)
            assert set(runtime.places_missing.values()) == {"the server is away"}
            assert await runtime.weights_changed() == 1
            assert await runtime.sleep() == 0
            await runtime.wake()
            for each in (x, y):
                each.there.set()
            await aeventually(lambda: len(runtime.alive) == 2)
            assert not runtime.places_missing
            return [spec.path for spec in x.specs + y.specs]

    assert play(story()) == [OWNER] * 4


def test_a_rollout_is_as_exact_as_its_least_exact_instance(by_hand, hand, some_groups):
    async def story(*levels):
        engines = [hand(f"x{number}") for number in range(len(levels))]
        for engine, level in zip(engines, levels, strict=True):
            engine.info = msgspec.structs.replace(engine.info, exactness=level)
        async with by_hand(*engines) as runtime:
            under_way = runtime.rollout(some_groups(1, 1))
            for engine in engines:
                if engine.jobs:
                    engine.finish()
            return (await under_way.wait()).summary.exactness

    assert play(story("exact", "exact")) == "exact"
    assert play(story("exact", "reproducible")) == "reproducible"
    assert play(story("distributed", "reproducible")) == "distributed"


class Described:
    """A fleet whose model is asked for when it is first read."""

    def __init__(self, engines):
        self.engines, self.clock, self.asked = engines, RealClock(), 0

    @property
    def model(self):
        self.asked += 1
        raise EngineError("no server answers")

    @property
    def tokenizer(self):
        return None


def test_a_model_that_is_asked_of_a_server_is_not_asked_for_before_it_is_read(hand):
    fleet = Described([hand("x")])
    assert flaw_of(fleet, EngineFleet) is None
    runtime = Runtime(Assembly(fleet, Strategies(Policies())), SeerTable())
    assert fleet.asked == 0
    with pytest.raises(EngineError, match="no server answers"):
        runtime.model  # noqa: B018
    del Described.model
    assert flaw_of(fleet, EngineFleet) == "it lacks model"


@attrs.define
class Growing:
    """A fleet in which ``more`` join one after another, and the first leaves."""

    engines: list
    more: list
    clock: object = attrs.Factory(RealClock)
    model: object = ModelInfo(1000, 512)
    tokenizer: object = None

    async def follow(
        self,
        join: Callable[[object], Awaitable[object]],
        leave: Callable[[str], Awaitable[object]],
    ) -> None:
        for engine in self.more:
            await join(engine)
        await leave(self.engines[0].id)
        await asyncio.Event().wait()


def test_instances_join_and_leave_as_their_fleet_announces(hand):
    async def story():
        x, y = hand("x"), hand("y")
        fleet = Growing([x], [y])
        assert isinstance(fleet, ChangingFleet)
        async with Runtime(Assembly(fleet, Strategies(Policies())), SeerTable()) as runtime:
            await aeventually(lambda: set(runtime.alive) == {"y"})
        return x.stops, y.stops

    assert play(story()) == (1, 1)


def test_hooks_see_the_sampling_of_the_run(tmp_path):
    rollout = {"temperature": 0.7, "top_p": 0.9, "stop": "end", "bad_words": ["no"]}
    config = make_config({"seer": {"engine": "sim"}, "rollout": rollout}, base_dir=tmp_path, origin="test")
    assert startup_of(config).sampling == Sampling(0.7, 0.9, stop=("end",))
