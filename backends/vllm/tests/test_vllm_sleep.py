"""An instance asleep gives the memory of its KV to others, and goes on as if nothing had been."""

import os
from pathlib import Path

import pytest

from seer_core.errors import EngineError
from seer_core.model import Sampling
from seer_core.ports.drafting import SourceSpec, StepTimes
from seer_core.ports.weights import directory

pytestmark = pytest.mark.engine
kv_local = pytest.importorskip("seer_kv_local", reason="backends/kv_local is not installed")

PLAIN = Sampling(1.0)
KV_BYTES = 40 * 1024 * 2048
TOKENS = 400


@pytest.fixture
def instance(start, models, notes, loop):
    """An instance with everything: it drafts, shares KV, and stops with its test."""
    pool = kv_local.LocalPool(64 << 20)
    loop.run_until_complete(pool.start(["vllm-0"]))
    spec = SourceSpec("draft_sources:Scripted", {"notes": str(notes)}, 5, StepTimes((1,), (0,), ((0.001,),)))
    harness = start(models[0], spec, pool)
    yield harness
    harness.run(harness.engine.stop())
    loop.run_until_complete(pool.stop())


def resident_bytes(harness):
    """Return what the system says that the instance's process holds."""
    return int(Path(f"/proc/{harness.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def scores(harness, prompts):
    jobs = [harness.job(prompt, TOKENS, seed, PLAIN) for seed, prompt in enumerate(prompts)]
    outputs = harness.run(harness.chunks(jobs))
    return [output.token_ids for output in outputs], [output.logprobs for output in outputs]


def test_asleep_it_holds_no_kv_memory_and_awake_it_answers_as_before(instance, models, prompts):
    many = prompts(8)
    before = scores(instance, many)
    held = resident_bytes(instance)
    freed = instance.run(instance.engine.sleep())
    assert 0.95 * KV_BYTES < freed < 1.2 * KV_BYTES
    assert held - resident_bytes(instance) > 0.95 * KV_BYTES
    instance.run(instance.engine.wake())
    assert scores(instance, many) == before
    instance.run(instance.engine.sleep())
    with pytest.raises(EngineError, match="it is asleep; wake it first"):
        instance.run(instance.engine.update_weights(directory(models[1]), 1))
    instance.run(instance.engine.wake())
    instance.run(instance.engine.update_weights(directory(models[1]), 1))
    instance.weight_version = 1
    assert scores(instance, many[:2])[0] != before[0][:2]
    assert instance.degradations == []
