"""Rollouts on real vLLM engines over a real Mooncake: moved at every chunk, and with the master killed."""

import asyncio
from pathlib import Path

import attrs
import pytest
import seer_mooncake.master
from seer_host.config_files import load_config
from seer_session.assembly import fill_slots
from seer_session.prompts import read_prompts
from seer_session.runtime import Runtime

from backends.tests.mover import Mover
from seer_core.scheduling.scheduler import Slot
from tests.support.installed import skip_without
from tests.support.processes import command_of, descendants

pytestmark = [pytest.mark.engine, pytest.mark.long]
skip_without("vllm", reason="vLLM is not installed: `make setup` installs it")
pytest.importorskip("seer_vllm", reason="backends/vllm is not installed")
pytest.importorskip("seer_divided_rollout", reason="plugins/divided_rollout is not installed")

EXAMPLE = Path(__file__).parents[3] / "examples" / "tiny_reasoner"
BLOCK_TOKENS = 32
CHUNK_TOKENS = 96
GROUPS = slice(2, 3)  # long responses


def test_moved_rollouts_give_the_same_tokens_also_when_the_master_dies(master_of, monkeypatch):
    monkeypatch.setattr(seer_mooncake.master, "RESTARTS", 1)
    settings = {
        "seer.plugins": "[]",
        "seer.kv_pool": "mooncake",
        "kv_pool.mooncake.capacity_bytes": 512 << 20,
        "kv_pool.mooncake.timeout_s": 10.0,
        "plugin.divided_rollout.chunk_tokens": CHUNK_TOKENS,
    }
    config = load_config(EXAMPLE / "demo.toml", [f"{key}={value}" for key, value in settings.items()])
    before = set(descendants())

    async def main():
        async with Runtime.from_config(config) as runtime:
            pool = runtime.kv_pool.strategy
            groups = read_prompts(
                EXAMPLE / "prompts.jsonl", config.rollout, runtime.model, runtime.tokenizer
            ).groups[GROUPS]

            async def roll_out(plugins, **policies):
                strategies = fill_slots(config.with_plugins(plugins))
                policies = attrs.evolve(strategies.policies, **policies)
                await runtime.use(attrs.evolve(strategies, policies=policies))
                await runtime.reset_caches()
                result = await runtime.rollout(groups).wait()
                return {one.request_id: one for one in result.completions}, result.summary

            def counted():
                return [pool._counted[name] for name in ("away", "refused_blocks", "torn_blocks")]

            whole, summary = await roll_out(())
            assert summary.pool_tokens == 0

            moved, summary = await roll_out(("divided_rollout",), placer=Slot("placer", "test", Mover()))
            assert tokens(moved) == tokens(whole)
            chunks = [chunk for one in moved.values() for chunk in one.chunks[1:]]
            assert len(chunks) == summary.migrations > 30
            assert counted() == [0, 0, 0]
            assert max(chunk.prefilled_tokens for chunk in chunks) <= BLOCK_TOKENS
            assert summary.pool_tokens > summary.prefilled_tokens

            def kill_master():
                master = master_of(pool)
                if master is not None:  # else it is being started again
                    master.kill()
                return master is not None

            harm = Mover([(12, kill_master), (30, kill_master)])
            harmed, summary = await roll_out(("divided_rollout",), placer=Slot("placer", "test", harm))
            assert not harm.acts  # a master was killed, and the next one for good
            assert tokens(harmed) == tokens(whole)
            assert summary.instances_lost == 0
            assert counted()[0] > 0

    asyncio.run(main())
    left = map(command_of, set(descendants()) - before)
    assert [one for one in left if "seer fork server" not in one] == []  # it forks for later runs


def tokens(completions):
    return {name: completion.token_ids for name, completion in completions.items()}
