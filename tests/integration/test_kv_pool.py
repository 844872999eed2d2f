"""The slot ``kv_pool``: who fills it, when it is started, cleared and stopped, and what is counted."""

import asyncio

import attrs
import pytest
import structlog
from seer_cli.comparison import arms_of
from seer_cli.installed import slots_of
from seer_host.config_files import load_config
from seer_session.assembly import assemble

from seer_core.errors import ConfigError, EngineError, PluginError
from seer_core.model import InstanceInfo
from seer_core.model.events import ChunkFinished
from seer_core.plugins.slots import Strategies
from seer_core.ports.kv import PoolStats, StoreSpec
from seer_core.scheduling.scheduler import Policies, Slot

POOL = """
import msgspec
from seer_core.plugins.hookspecs import hookimpl
from seer_core.model.events import ChunkFinished
from seer_core.ports.kv import PoolStats, StoreSpec
from seer_core.model import InstanceInfo

class Settings(msgspec.Struct, frozen=True):
    depth: int = 3

class Pool:
    def __init__(self, depth): self.depth = depth
    async def start(self, instances): pass
    async def stop(self): pass
    def store(self, instance_id): return StoreSpec("m:C", {})
    async def clear(self): pass
    def stats(self): return PoolStats(0)

@hookimpl
def seer_make_kv_pool(settings):
    return Pool(settings.depth)
"""


class Noted:
    """A pool that notes the calls of its methods."""

    def __init__(self, failing=None):
        self.calls = []
        self.failing = failing

    async def start(self, instances):
        self._note(("start", *instances))

    async def stop(self):
        self._note("stop")

    def store(self, instance_id):
        return StoreSpec("module:Class", {"for": instance_id})

    async def clear(self):
        self._note("clear")

    def stats(self):
        return PoolStats(1 << 20)

    def _note(self, call):
        self.calls.append(call)
        if self.failing is not None and self.failing in (call, call[0]):
            raise OSError("out of order")


class Seen:
    """Observer that keeps what it sees."""

    def __init__(self):
        self.events = []

    def observe(self, now, event, commands):
        self.events.append(event)


class Halves:
    """Splitter of chunks of half of what is left."""

    def split(self, request):
        return -(-request.remaining_tokens // 2)


def slot(pool):
    return Slot("kv_pool", "noted", pool)


def test_the_pool_is_the_one_that_is_named_and_there_is_none_by_default(write_config):
    assembly = assemble(load_config(write_config(seer='kv_pool = "local"')))
    assert (assembly.kv_pool.owner, assembly.kv_pool.strategy.capacity_bytes) == ("local", 1 << 30)
    assert assemble(load_config(write_config())).kv_pool is None
    assert assemble(load_config(write_config(seer='kv_pool = "none"'))).kv_pool is None


def test_another_pool_is_one_line_and_has_a_table_of_its_own(write_config, distribution):
    distribution("puddle", POOL)
    config = load_config(write_config(more="[kv_pool.puddle]\ndepth = 7", seer='kv_pool = "puddle"'))
    assert assemble(config).kv_pool.strategy.depth == 7
    assert slots_of(config)["puddle"] == ("kv_pool",)


@pytest.mark.parametrize(
    ("plugins", "more", "seer", "fact"),
    [
        (
            [],
            "",
            'kv_pool = "locl"',
            r"\[seer\].kv_pool: .* 'locl'; did you mean 'local'\?; install .* 'none'",
        ),
        ([], "", 'kv_pool = "sim"', "'sim' makes no KV pool"),
        ([], "[kv_pool.locl]\nx = 1", "", r"kv_pool.locl.*no installed plug-in.*did you mean 'local'"),
        (
            [],
            "[kv_pool.local]\ncapacity = 1",
            'kv_pool = "local"',
            "'capacity'.*did you mean 'capacity_bytes'",
        ),
        (["local"], "", "", "'local' in .* makes a KV pool only; write kv_pool = \"local\" instead"),
    ],
)
def test_a_wrong_pool_is_named_before_anything_starts(write_config, plugins, more, seer, fact):
    with pytest.raises(ConfigError, match=fact):
        assemble(load_config(write_config(plugins, more, seer=seer)))


def test_engines_get_the_pool_and_it_lives_as_long_as_they_do(by_hand, hand):
    pool, engines = Noted(), [hand("a"), hand("b"), hand("c")]
    engines[1].shares_kv = False

    async def main():
        async with by_hand(*engines, kv_pool=slot(pool)):
            assert all(engine.kv_pool is pool for engine in engines)
            assert pool.calls == [("start", "a", "c")]
        assert pool.calls[1:] == ["stop"]

    asyncio.run(main())


def test_a_pool_that_no_engine_uses_is_not_started(by_hand, hand):
    pool, engine = Noted(), hand("a")
    engine.shares_kv = False

    async def main():
        async with by_hand(engine, kv_pool=slot(pool)):
            assert pool.calls == []

    asyncio.run(main())


class Growing(Noted):
    """A pool that makes room for newcomers."""

    async def add(self, instance_id):
        self._note(("add", instance_id))


def test_a_newcomer_shares_kv_where_the_pool_makes_room_for_it(by_hand, hand):
    fixed, growing, unused = Noted(), Growing(), Growing()

    async def main(pool, shares=True):
        engine, newcomer, other = hand("a"), hand("b"), hand("c")
        engine.shares_kv, other.shares_kv = shares, False
        async with by_hand(engine, kv_pool=slot(pool)) as runtime:
            await runtime.add(newcomer)
            await runtime.add(other)
            return newcomer.kv_pool

    assert asyncio.run(main(fixed)) is None
    assert asyncio.run(main(growing)) is growing
    assert growing.calls == [("start", "a"), ("add", "b"), "stop"]
    assert asyncio.run(main(unused, shares=False)) is None  # it has not been started
    assert unused.calls == ["stop"]


def test_without_a_pool_engines_get_none(by_hand, hand):
    engine = hand("a")
    engine.kv_pool = "of an earlier run"

    async def main():
        async with by_hand(engine):
            assert engine.kv_pool is None

    asyncio.run(main())


def test_resetting_caches_and_updating_weights_clear_the_pool(by_hand, hand):
    pool = Noted()

    async def main():
        async with by_hand(hand("a"), hand("b"), kv_pool=slot(pool)) as runtime:
            await runtime.reset_caches()
            assert pool.calls[1:] == ["clear"]
            await runtime.update_weights("somewhere")
            assert pool.calls[1:] == ["clear", "clear"]

    asyncio.run(main())


def test_a_pool_that_does_not_start_is_named_with_the_way_out(by_hand, hand):
    engine = hand("a")

    async def main():
        async with by_hand(engine, kv_pool=slot(Noted(failing="start"))):
            pass

    with pytest.raises(PluginError, match=r"'noted', slot 'kv_pool'.*out of order.*--set seer.kv_pool=none"):
        asyncio.run(main())
    assert engine.starts == 0


def test_a_pool_through_which_no_engine_shares_is_logged(simulated, by_hand, hand):
    def unused(runtime):
        async def main():
            async with runtime:
                pass

        with structlog.testing.capture_logs() as logs:
            asyncio.run(main())
        return [entry["pool"] for entry in logs if entry["event"] == "kv_pool_unused"]

    assert unused(simulated(kv_pool=slot(Noted()))) == ["noted"]
    assert unused(by_hand(hand("a"), kv_pool=slot(Noted()))) == []
    assert unused(simulated()) == []


def test_an_engine_that_cannot_share_as_configured_says_so_at_the_start(by_hand, hand):
    class Engine(hand):
        def set_kv_pool(self, pool):
            raise EngineError("it cannot")

    async def main():
        async with by_hand(Engine("a"), kv_pool=slot(Noted())):
            pass

    with pytest.raises(EngineError, match="it cannot"):
        asyncio.run(main())


def test_tokens_from_the_pool_are_counted_per_chunk_in_the_trace_and_in_the_summary(
    by_hand, hand, some_groups
):
    engine, seen = hand("a"), Seen()

    async def main():
        observers = [Slot("observer", "test", seen)]
        async with by_hand(engine, kv_pool=slot(Noted()), observers=observers) as runtime:
            rollout = runtime.rollout(some_groups(1, n=2))
            for job_id in list(engine.jobs):
                engine.finish(job_id, pool=3)
            return await rollout.wait()

    result = asyncio.run(main())
    assert [chunk.pool_tokens for one in result.completions for chunk in one.chunks] == [3, 3]
    assert result.summary.pool_tokens == 6
    finished = [event for event in seen.events if isinstance(event, ChunkFinished)]
    assert [(event.pool_tokens, event.cached_tokens) for event in finished] == [(3, 0), (3, 0)]
    assert all(event.prefilled_tokens > 0 for event in finished)


@pytest.mark.parametrize("shares", [True, False])
def test_engines_are_notified_of_the_end_of_a_group_where_there_is_a_pool(by_hand, hand, some_groups, shares):
    engines = [hand("a"), hand("b")]

    async def main():
        async with by_hand(*engines, kv_pool=slot(Noted()) if shares else None) as runtime:
            rollout = runtime.rollout(some_groups(1, n=2))
            for engine in engines:
                for job_id in list(engine.jobs):
                    assert not engine.forgotten
                    engine.finish(job_id)
            await rollout.wait()

    asyncio.run(main())
    assert [len(engine.forgotten) for engine in engines] == [shares, shares]


def test_only_instances_that_were_given_chunks_of_a_group_are_notified_of_its_end(by_hand, hand, some_groups):
    engines = [hand("a"), hand("b"), hand("c")]

    async def main():
        async with by_hand(*engines, kv_pool=slot(Noted())) as runtime:
            rollout = runtime.rollout(some_groups(2, n=1))
            for engine in engines[:2]:
                [job_id] = engine.jobs
                engine.finish(job_id)
            await rollout.wait()

    asyncio.run(main())
    assert [engine.forgotten for engine in engines] == [["a"], ["b"], []]


def test_a_chunk_says_whether_its_response_ends_with_it(by_hand, hand, some_groups):
    engine = hand("a")

    async def main():
        async with by_hand(engine) as runtime:
            runtime._controller.scheduler.policies = attrs.evolve(
                runtime._controller.scheduler.policies, splitter=Slot("splitter", "test", Halves())
            )
            rollout = runtime.rollout(some_groups(1, n=1))
            seen = []
            while engine.jobs:
                [job] = engine.jobs.values()
                seen.append(job.last)
                engine.finish(job.id, tokens=job.max_tokens, stopped=False)
            await rollout.wait()
            return seen

    seen = asyncio.run(main())
    assert len(seen) > 2
    assert seen == [False] * (len(seen) - 1) + [True]


def test_figures_since_a_moment_are_counts_since_then_and_sizes_as_they_are():
    before = PoolStats(100, used_bytes=10, put_bytes=10, hit_blocks=3)
    after = PoolStats(100, used_bytes=30, put_bytes=50, hit_blocks=4, released_blocks=2)
    assert after.since(before) == PoolStats(100, used_bytes=30, put_bytes=40, hit_blocks=1, released_blocks=2)


@pytest.mark.parametrize(
    ("prefill_s", "fetch_s", "cost"),
    [(0.0, None, 1.0), (1e-4, None, 1.0), (1e-4, 1e-5, 0.1), (1e-5, 1e-4, 1.0), (0.0, 1e-5, 0.0)],
)
def test_what_a_move_costs_is_a_share_of_prefilling_again(prefill_s, fetch_s, cost):
    info = InstanceInfo("a", 64, 16, 4, 64, 128, prefill_s, fetch_s)
    assert info.move_cost == pytest.approx(cost)


def test_sim_engines_share_nothing(simulated):
    pool = Noted()

    async def main():
        async with simulated(kv_pool=slot(pool)):
            assert pool.calls == []

    asyncio.run(main())


def test_a_comparison_s_baseline_shares_no_kv(write_config):
    arms = arms_of(load_config(write_config(["divided_rollout"])))
    assert [(arm.name, arm.shares_kv) for arm in arms] == [
        ("baseline", False),
        ("+ divided_rollout", True),
        ("oracle", True),
    ]


def test_engines_start_anew_when_the_pool_changes_and_only_then(by_hand, hand):
    engine, noted = hand(), Noted()
    pool = Slot("kv_pool", "noted", noted)

    async def main():
        async with by_hand(engine) as runtime:
            await runtime.use(Strategies(Policies()))
            assert engine.starts == 1
            await runtime.use(Strategies(Policies()), pool)
            assert (engine.starts, noted.calls) == (2, [("start", engine.id)])
            await runtime.use(Strategies(Policies()))
            assert engine.starts == 2
            await runtime.use(Strategies(Policies()), None)
            assert (engine.starts, noted.calls[-1]) == (3, "stop")

    asyncio.run(main())
