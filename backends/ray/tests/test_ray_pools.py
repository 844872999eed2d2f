"""Rollouts whose instances share KV on machines that have no memory, no /proc and no files in common."""

import tempfile
from contextlib import asynccontextmanager
from pathlib import Path

import attrs
import msgspec
import pytest
from pooled import BLOCK_TOKENS
from seer_divided_rollout import Chunks
from seer_host.config_files import load_config
from seer_kv_local import NodePools
from seer_mooncake import MooncakePool
from seer_mooncake import Settings as MooncakeSettings
from seer_mooncake.cleanup import PREFIX
from seer_mooncake.system import installation
from seer_session.assembly import fill_slots
from seer_session.prompts import read_prompts
from seer_session.runtime import Runtime
from seer_worker.client.local import LocalLauncher
from seer_worker.client.process_client import ProcessClient

from seer_core.errors import EngineError
from seer_core.plugins.slots import Strategies
from seer_core.scheduling.scheduler import Policies, Slot

pytest.importorskip("ray")

from machines import WORKER
from ray_rollouts import Reaper, patient, play, some_groups, tokens, workers_of
from seer_ray.launcher import RayLauncher

from tests.support.eventually import aeventually

EXAMPLE = Path(__file__).parents[3] / "examples/tiny_reasoner"
POOL_BYTES = 64 << 20


class Mover:
    """Placer that sends each chunk to another instance than the last, the next by number, if there is one."""

    def instance_changed(self, instance):
        pass

    def instance_lost(self, instance):
        pass

    def place(self, request, chunk_tokens, instances):
        last = next((one.seq for one in instances if one.id == request.instance), -1)
        free = [one for one in instances if one.free_slots > 0 and (one.seq != last or len(instances) == 1)]
        return min(free, key=lambda one: (one.seq <= last, one.seq), default=None)


@pytest.fixture
def expected(make_runtime):
    """The tokens of the same rollout of child processes, without a pool."""

    async def run():
        async with make_runtime(LocalLauncher(), instance="pooled:Pooled", instances=1) as runtime:
            return tokens(await runtime.rollout(some_groups()).wait())

    return play(run())


@pytest.fixture
def launcher(machines):
    """Two instances fit on a machine."""
    return RayLauncher(patient(machines.address, host=machines.host, cpus=0.5))


@pytest.fixture
def sharing(make_runtime, launcher):
    """Return a context manager: a runtime whose instances share KV, and move at every chunk."""

    @asynccontextmanager
    async def sharing(pool, *observers, **changes):
        runtime = make_runtime(launcher, instance="pooled:Pooled", **changes)
        policies = Policies(
            splitter=Slot("splitter", "test", Chunks(16)), placer=Slot("placer", "test", Mover())
        )
        slots = tuple(Slot("observer", "test", each) for each in observers)
        await runtime.use(Strategies(policies, slots), Slot("kv_pool", "test", pool))
        async with runtime:
            yield runtime

    return sharing


@pytest.fixture
def mooncake(launcher):
    """Return a function that makes a pool, where Mooncake can be loaded."""
    found = installation()
    if not found.ok:
        pytest.skip(f"{found.finding}; {found.remedy}")

    def make(**settings):
        own = {"buffer_bytes": 1 << 20, "start_timeout_s": 60.0, "timeout_s": 60.0}
        place = Path(settings.get("disk_path", tempfile.gettempdir()))
        return MooncakePool(MooncakeSettings(POOL_BYTES, **(own | settings)), place, launcher)

    return make


def full_blocks(context):
    return (context - 1) // BLOCK_TOKENS


def found_within(completions, reach):
    """Return what each chunk found in the pool, and what it had to if instances of one reach share all."""
    found, there = [], []
    prompt_tokens = {each.id: len(each.prompt_token_ids) for each in some_groups()}
    for completion in completions:
        saved, context = {}, prompt_tokens[completion.group_id]
        for chunk in completion.chunks:
            here = reach[chunk.instance]
            found.append(chunk.pool_tokens)
            there.append(BLOCK_TOKENS * saved.get(here, 0))
            context += chunk.tokens
            saved[here] = full_blocks(context)
    return found, there


def nodes_of(runtime):
    return {name: info.node for name, info in runtime.alive.items()}


def test_with_mooncake_a_request_moves_between_machines_without_a_prefill(sharing, mooncake, expected):
    async def run():
        async with sharing(mooncake(), instances=3) as runtime:
            nodes = nodes_of(runtime)
            assert len(set(nodes.values())) >= 2
            assert {info.kv_reach for info in runtime.alive.values()} == {""}
            result = await runtime.rollout(some_groups()).wait()
            found, there = found_within(result.completions, dict.fromkeys(nodes, "everywhere"))
            assert found == there
            assert sum(found) > 0
            return tokens(result)

    assert play(run()) == expected


def test_the_local_pool_is_one_on_each_machine(sharing, expected):
    async def run():
        async with sharing(NodePools(POOL_BYTES), instances=6) as runtime:
            nodes = nodes_of(runtime)
            assert len(set(nodes.values())) == 3
            assert {name: info.kv_reach for name, info in runtime.alive.items()} == nodes
            result = await runtime.rollout(some_groups()).wait()
            found, there = found_within(result.completions, nodes)
            assert found == there
            assert 0 < sum(found) < sum(found_within(result.completions, dict.fromkeys(nodes, ""))[1])
            stats = runtime.kv_pool.strategy.stats()
            assert stats.hit_blocks * BLOCK_TOKENS == sum(found)
            assert stats.used_bytes > 0
            await runtime.reset_caches()
            again = await runtime.rollout(some_groups()).wait()
            found, there = found_within(again.completions, nodes)
            assert found == there
            assert tokens(again) == tokens(result)
            return tokens(result)

    assert play(run()) == expected


@pytest.mark.parametrize("kind", ["mooncake", "local"])
def test_a_machine_is_killed_in_mid_rollout_and_its_kv_is_a_miss(machines, sharing, mooncake, expected, kind):
    def kill():
        # The first two instances have all first chunks, so one of them must live for some KV to be left.
        fleet = running[0]._fleet
        first, second, third, _ = [fleet.engines[name].worker.started.node_id for name in fleet.alive]
        machines.node(third if first == second else first).kill()

    async def run():
        pool = mooncake() if kind == "mooncake" else NodePools(POOL_BYTES)
        async with sharing(pool, Reaper(kill), instances=4, step_s=0.01) as runtime:
            running.append(runtime)
            result = await runtime.rollout(some_groups()).wait()
            assert result.summary.instances_lost >= 1
            assert result.summary.pool_tokens > 0, (pool.stats(), nodes_of(runtime))
            await runtime._fleet.restarts_over()
            again = await runtime.rollout(some_groups()).wait()
            assert again.summary.instances_lost == 0
            assert tokens(again) == tokens(result)
            return tokens(result)

    running = []
    try:
        assert play(run()) == expected
    finally:
        for machine in [each for each in machines.machines if not each.up]:
            machines.remove(machine)
            machines.add()


@pytest.mark.parametrize("kind", ["mooncake", "local"])
def test_an_instance_that_joins_later_shares_what_the_pool_has(sharing, mooncake, expected, kind):
    async def run():
        pool = mooncake() if kind == "mooncake" else NodePools(POOL_BYTES)
        async with sharing(pool, instances=3) as runtime:
            capacity = pool.stats().capacity_bytes
            newcomer = ProcessClient("late", runtime.engines["scripted-0"].spec)
            await runtime.add(newcomer)
            assert pool.stats().capacity_bytes > capacity
            nodes = nodes_of(runtime)
            result = await runtime.rollout(some_groups()).wait()
            reach = dict.fromkeys(nodes, "") if kind == "mooncake" else nodes
            found, there = found_within(result.completions, reach)
            assert found == there
            chunks = [chunk for each in result.completions for chunk in each.chunks]
            assert kind == "local" or any(each.pool_tokens for each in chunks if each.instance == "late")
            return tokens(result)

    assert play(run()) == expected


def held_on(machine):
    """Return the disk tier's directories on a machine, whose files are its own."""
    [process, *_] = machine.processes()
    return [each.name for each in Path(f"/proc/{process.pid}/root/tmp").glob(f"{PREFIX}*")]


def test_each_node_has_a_directory_on_its_disk_which_goes_with_its_instance(
    machines, sharing, mooncake, expected
):
    def held():
        return [name for machine in machines.machines for name in held_on(machine)]

    async def run():
        async with sharing(mooncake(disk_bytes=64 << 20), Reaper(kill), instances=2, step_s=0.01) as runtime:
            running.append(runtime)
            assert sorted(name.rpartition("-")[0][-2:] for name in held()) == ["-0", "-1"]
            result = await runtime.rollout(some_groups()).wait()
            assert result.summary.instances_lost == 1
        await aeventually(lambda: not held())
        return tokens(result)

    def kill():
        [worker, *_] = machines.node(workers_of(running[0])[0].node_id).processes(WORKER)
        worker.kill()

    running = []
    assert play(run()) == expected
    assert list(Path(tempfile.gettempdir()).glob(f"{PREFIX}*")) == []


def test_a_directory_that_a_node_lacks_ends_the_start_with_a_sentence(sharing, mooncake, tmp_path):
    async def run():
        async with sharing(mooncake(disk_bytes=64 << 20, disk_path=str(tmp_path))):
            pass

    with pytest.raises(EngineError, match=r"node s\w+-\w+: /\S+ is no directory.*; correct \[kv_pool"):
        play(run())


@pytest.mark.engine
@pytest.mark.long
def test_vllm_moves_between_machines_without_a_prefill_and_loses_one(machines, mooncake):
    mooncake()  # skips where it cannot be loaded

    def config(*more):
        settings = ["seer.plugins=[]", "plugin.divided_rollout.chunk_tokens=96", *more]
        return load_config(EXAMPLE / "demo.toml", settings)

    async def run(config, *observers, placer=None):
        async with Runtime.from_config(config) as runtime:
            running[:] = [runtime]
            strategies = fill_slots(config.with_plugins(("divided_rollout",)))
            if placer is not None:
                policies = attrs.evolve(strategies.policies, placer=Slot("placer", "test", placer))
                strategies = attrs.evolve(strategies, policies=policies)
            await runtime.use(strategies.with_observer(*observers))
            [group] = read_prompts(
                EXAMPLE / "prompts.jsonl", config.rollout, runtime.model, runtime.tokenizer
            ).groups[2:3]
            return await runtime.rollout([msgspec.structs.replace(group, n=4, max_tokens=512)]).wait()

    def kill():
        machines.node(workers_of(running[0])[0].node_id).kill()

    running = []
    here = play(run(config("engine.vllm.instances=1", "seer.kv_pool=none")))
    cluster = [
        "seer.launcher=ray",
        f"launcher.ray.address={machines.address}",
        f"launcher.ray.host={machines.host}",
        "seer.kv_pool=mooncake",
        f"kv_pool.mooncake.capacity_bytes={256 << 20}",
        "kv_pool.mooncake.start_timeout_s=60.0",
        "kv_pool.mooncake.timeout_s=60.0",
    ]
    there = play(run(config(*cluster), Reaper(kill), placer=Mover()))
    assert tokens(there) == tokens(here)
    assert there.summary.instances_lost == 1
    assert there.summary.pool_tokens > 0
    print(
        f"{there.summary.migrations} moves, {there.summary.pool_tokens} tokens from the pool,"
        f" {there.summary.prefilled_tokens} prefilled"
    )
