"""Drafts from what siblings wrote on another instance, on two real vLLM engines."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import attrs
import msgspec
import pytest
from seer_host.config_files import load_config
from seer_session.assembly import fill_slots
from seer_session.runtime import Runtime

from seer_core.ports.drafting import StepTimes
from seer_core.scheduling.scheduler import Slot
from tests.support.eventually import aeventually
from tests.support.installed import skip_without

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny_reasoner"
FREE = StepTimes((1, 64), (0, 8), ((1.0, 1.0), (1.0, 1.0)))
"""Drafts cost nothing, so as many as there are get verified, however fast this machine is."""

pytestmark = [pytest.mark.engine, pytest.mark.long]
skip_without("vllm", reason="vLLM is not installed: `make setup` installs it")


class Apart:
    """Placer: the first instance writes the probe, and when it is over the second one writes the others."""

    def instance_changed(self, instance):
        pass

    def instance_lost(self, instance):
        pass

    def place(self, request, chunk_tokens, instances):
        if len(instances) < 2 or (not request.probe and not request.group.finished):
            return None
        return (
            min(instances, key=lambda each: each.id) if request.probe else max(instances, key=lambda e: e.id)
        )


def test_siblings_and_earlier_text_is_drafted_on_another_instance_also_after_one_was_killed(tmp_path):
    (tmp_path / "profile.json").write_bytes(msgspec.json.encode(FREE))
    settings = [
        "engine.vllm.max_model_tokens=400",
        "engine.vllm.max_running=16",
        "engine.vllm.start_timeout_s=400",
        "seer.kv_pool=none",
        f"plugin.grouped_spec.profile={tmp_path / 'profile.json'}",
    ]
    lines = (EXAMPLE / "prompts.jsonl").read_text("utf-8").splitlines()[:2]
    few = {"n": 4, "max_tokens": 240, "temperature": 0.0}  # so that siblings write the same
    records = [msgspec.json.decode(line) | few for line in lines]

    def strategies(*more):
        config = load_config(EXAMPLE / "demo.toml", [*settings, *more]).with_plugins(["grouped_spec"])
        filled = fill_slots(config)
        policies = attrs.evolve(filled.policies, placer=Slot("placer", "apart", Apart()))
        return attrs.evolve(filled, policies=policies)

    async def main():
        runtime = Runtime.from_config(load_config(EXAMPLE / "demo.toml", settings).with_plugins(()))
        await runtime.use(strategies())
        async with runtime:
            fleet = runtime._fleet
            groups = runtime.groups(records)
            shared = await runtime.rollout(groups).wait()
            second = max(fleet.engines)
            os.kill(fleet.engines[second].worker.pid, signal.SIGKILL)
            await aeventually(lambda: second not in fleet.alive)
            await fleet.restarts_over()
            assert not fleet.failed
            again = await runtime.rollout(groups).wait()
            await runtime.use(strategies("plugin.grouped_spec.share=false"))
            alone = await runtime.rollout(groups).wait()
            await runtime.use(strategies("plugin.grouped_spec.earlier_responses=1"))
            first = await runtime.rollout(groups).wait()
            second = await runtime.rollout(groups).wait()
        return shared, again, alone, first, second

    shared, again, alone, first, second = asyncio.run(main())
    assert texts(shared) == texts(again) == texts(alone) == texts(first) == texts(second)
    assert acceptance(shared) > 1.2 * acceptance(alone)
    assert acceptance(again) > 1.2 * acceptance(alone)
    assert acceptance(second, probes=True) > 1.5 * acceptance(first, probes=True)


def texts(result):
    return {each.request_id: each.token_ids for each in result.completions}


def acceptance(result, *, probes=False):
    """Return the tokens per step of the probes, or of all other responses."""
    chunks = [chunk for each in result.completions if (each.index == 0) == probes for chunk in each.chunks]
    assert {chunk.instance for chunk in chunks} == {f"vllm-{int(not probes)}"}
    return sum(chunk.tokens for chunk in chunks) / sum(chunk.steps for chunk in chunks)
