"""A real vLLM engine that is stopped again and again: what runs there goes on at the other one."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from seer_host.config_files import load_config
from seer_session.assembly import fill_slots
from seer_session.runtime import Runtime

from seer_core.model.events import ChunkFinished, Dispatch
from seer_core.plugins.slots import Strategies
from seer_core.scheduling.scheduler import Policies
from tests.support.installed import skip_without

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny_reasoner"
SETTINGS = [
    'seer.plugins=["divided_rollout"]',
    "seer.kv_pool=none",
    "engine.vllm.instances=2",
    "engine.vllm.max_running=16",
    "engine.vllm.start_timeout_s=300",
    "plugin.divided_rollout.chunk_tokens=64",
]
QUICK, SLOW = "vllm-0", "vllm-1"
CHUNKS_OF_QUICK = 16
"""So many chunks finish on the one while the other is stopped: several of each request there."""

pytestmark = pytest.mark.engine
skip_without("vllm", reason="vLLM is not installed: `make setup` installs it")


class Brake:
    """Observer that stops an instance's process whenever a chunk is sent there, until the other has worked.

    It goes on once the other instance has finished ``CHUNKS_OF_QUICK`` chunks, or has none left.  So its
    chunks take several times as long as those of the other, however fast the machine is.
    """

    def __init__(self, process_id):
        self.process_id = process_id
        self.running = Counter()
        self.reasons = Counter()
        self.left = 0

    def observe(self, now, event, commands):
        if isinstance(event, ChunkFinished):
            self.running[event.instance_id] -= 1
            self.left -= event.instance_id == QUICK
        for command in commands:
            if isinstance(command, Dispatch):
                self.running[command.instance_id] += 1
                self.reasons[command.why, command.instance_id] += 1
                if command.instance_id == SLOW and self.left <= 0:
                    self.left = CHUNKS_OF_QUICK
                    os.kill(self.process_id, signal.SIGSTOP)
        if self.left <= 0 or not self.running[QUICK]:
            self.left = 0
            os.kill(self.process_id, signal.SIGCONT)


@pytest.mark.long
def test_responses_leave_an_instance_that_is_stopped_again_and_again():
    config = load_config(EXAMPLE / "demo.toml", SETTINGS)
    lines = (EXAMPLE / "prompts.jsonl").read_text("utf-8").splitlines()[:4]
    whole = {"n": 2, "max_tokens": 640, "ignore_eos": True}
    records = [msgspec.json.decode(line) | whole for line in lines]

    async def main():
        runtime = Runtime.from_config(config)
        await runtime.use(Strategies(Policies()))
        async with runtime:
            groups = runtime.groups(records)
            plain = await runtime.rollout(groups).wait()
            brake = Brake(runtime.engines[SLOW].worker.pid)
            await runtime.use(fill_slots(config).with_observer(brake))
            braked = await runtime.rollout(groups).wait()
        return plain, braked, brake

    plain, braked, brake = asyncio.run(main())
    assert texts(braked) == texts(plain)
    assert braked.summary.instances_lost == 0
    assert brake.reasons["slow", QUICK] > 0
    assert brake.reasons["slow", SLOW] == 0
    assert {each.chunks[-1].instance for each in braked.completions} == {QUICK}


def texts(result):
    return {each.request_id: each.token_ids for each in result.completions}
