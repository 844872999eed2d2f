"""One rollout on a real vLLM and a real SGLang, whose requests go from one to the other and back."""

from __future__ import annotations

import asyncio
from pathlib import Path

import attrs
import msgspec
import pytest
from seer_host.config_files import load_config
from seer_session.assembly import fill_slots
from seer_session.runtime import Runtime

from seer_core.model.events import Complete
from seer_core.ports.drafting import StepTimes
from seer_core.scheduling.scheduler import Slot
from tests.support.installed import skip_without
from tests.support.killer import Killer, kill_worker_of

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny_reasoner"
SETTINGS = [
    'seer.engine=["vllm", "sglang"]',
    *(f"engine.{kind}.instances=1" for kind in ("vllm", "sglang")),
    *(f"engine.{kind}.max_model_tokens=600" for kind in ("vllm", "sglang")),
    *(f"engine.{kind}.max_running=16" for kind in ("vllm", "sglang")),
    *(f"engine.{kind}.start_timeout_s=300" for kind in ("vllm", "sglang")),
    "plugin.divided_rollout.chunk_tokens=32",
]
FREE = StepTimes((1, 64), (0, 8), ((1.0, 1.0), (1.0, 1.0)))
"""Drafts cost nothing, so as many as there are get verified; and no instance measures its steps."""
KILL_AFTER = 4
"""Responses that have finished when the kill comes."""

pytestmark = pytest.mark.engine
skip_without("vllm", reason="vLLM is not installed: `make setup` installs it")


class Only:
    """Placer that uses one instance."""

    def __init__(self, name):
        self.name = name

    def instance_changed(self, instance):
        pass

    def instance_lost(self, instance):
        pass

    def place(self, request, chunk_tokens, instances):
        return next(
            (each for each in instances if each.id == self.name and each.running < each.info.max_running),
            None,
        )


class Migrating(Only):
    """Placer that lets no request stay, where it can go elsewhere."""

    def __init__(self):
        pass

    def place(self, request, chunk_tokens, instances):
        free = [each for each in instances if each.running < each.info.max_running]
        return next((each for each in free if each.id != request.instance or len(instances) == 1), None)


def test_a_rollout_goes_from_vllm_to_sglang_and_back_and_on_without_one_of_them(tmp_path):
    profile = tmp_path / "profile.json"
    profile.write_bytes(msgspec.json.encode(FREE))
    config = load_config(EXAMPLE / "demo.toml", [*SETTINGS, f"plugin.grouped_spec.profile={profile}"])
    lines = (EXAMPLE / "prompts.jsonl").read_text("utf-8").splitlines()[:4]
    records = [msgspec.json.decode(line) | {"n": 3, "max_tokens": 200} for line in lines]
    filled = fill_slots(config)

    def placed_by(placer):
        return attrs.evolve(
            filled, policies=attrs.evolve(filled.policies, placer=Slot("placer", "test", placer))
        )

    async def main():
        found = {}
        runtime = Runtime.from_config(config)
        await runtime.use(placed_by(Migrating()))
        async with runtime:
            assert set(runtime.alive) == {"vllm-0", "sglang-0"}
            groups = runtime.groups(records)
            found["mixed"] = await runtime.rollout(groups).wait()
            for name in ("vllm-0", "sglang-0"):
                await runtime.use(placed_by(Only(name)))
                found[name] = await runtime.rollout(groups).wait()
            assert await runtime.update_weights(EXAMPLE / "weights") == 1
            assert set(runtime.alive) == {"vllm-0", "sglang-0"}
            killer = Killer(kill_worker_of(runtime), after=KILL_AFTER, of=Complete, instance="sglang-0")
            await runtime.use(placed_by(Migrating()).with_observer(killer))
            found["killed"] = await runtime.rollout(groups).wait()
            assert killer.killed == "sglang-0"
            await runtime._fleet.restarts_over()
            assert set(runtime.alive) == {"vllm-0", "sglang-0"}
        return found

    found = asyncio.run(main())
    whole = texts(found["vllm-0"])
    assert texts(found["sglang-0"]) == texts(found["mixed"]) == texts(found["killed"]) == whole
    mixed = found["mixed"].summary
    assert mixed.migrations == mixed.chunks - mixed.requests > 0
    chunks = [chunk for each in found["mixed"].completions for chunk in each.chunks]
    for name in ("vllm-0", "sglang-0"):
        assert sum(sum(chunk.accepted_at) for chunk in chunks if chunk.instance == name) > 0
    assert found["killed"].summary.instances_lost == 1


def texts(result):
    return {each.request_id: each.token_ids for each in result.completions}
