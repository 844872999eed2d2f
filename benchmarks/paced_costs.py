"""What a paced instance costs this machine: memory and CPU to start one, CPU per step by batch size.

All instances live in this process, on a virtual clock.  With ``--real`` each has a process
instead, and there are twice as many from round to round, as long as the machine keeps their pace; every
instance has 32 responses.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from time import process_time
from typing import Any

import structlog
from seer_paced.plugin import Settings, make_fleet
from seer_paced.script import Script
from seer_sim.lengths import Lengths

from seer_core.config import make_config
from seer_core.events import InstanceReported
from seer_core.model import PromptGroup, Sampling
from seer_core.plugins import assemble
from seer_core.ports import ChunkJob, ChunkOutput
from seer_core.result import Summary
from seer_core.runtime import Runtime

PROMPT_TOKENS, TOKENS = 1000, 200


class Sink:
    """Counts what is answered."""

    def __init__(self) -> None:
        self.answered = 0

    def chunk_finished(self, instance_id: str, output: ChunkOutput) -> None:
        """Count."""
        self.answered += 1

    def chunk_failed(self, instance_id: str, job_id: str, reason: str) -> None:
        """Stop: nothing should fail."""
        raise RuntimeError(reason)

    def reported(self, report: InstanceReported) -> None:
        """Do nothing."""

    def troubled(self, trouble: Any) -> None:
        """Do nothing."""

    def lost(self, instance_id: str, reason: str) -> None:
        """Stop: nothing should die."""
        raise RuntimeError(reason)


def resident_mib() -> float:
    """Return this process's memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


def job(number: int, tokens: int) -> ChunkJob:
    """Return a chunk with a prompt of its own."""
    prompt = [3 + number, *range(3, PROMPT_TOKENS + 2)]
    name = f"r{number}"
    return ChunkJob(
        name, name, name, prompt, PROMPT_TOKENS, tokens, Sampling(), number, 0, known_tokens=tokens
    )


async def measure(instances: int, batches: Sequence[int]) -> dict[str, Any]:
    """Start instances, and make steps on the first of them."""
    settings = Settings(
        instances=instances,
        kv_capacity_tokens=1_310_720,
        max_model_tokens=45056,
        max_running=256,
        preset="h800-qwen2-vl-72b-tp8",
    )
    fleet = make_fleet(settings, None, Script(settings.vocab_size, Lengths()))
    sink, starts = Sink(), []
    for engine in fleet.engines:
        began_s, before_mib = process_time(), resident_mib()
        await engine.start(sink)
        starts.append({"cpu_s": process_time() - began_s, "mib": resident_mib() - before_mib})
    steps = []
    number, engine = 0, fleet.engines[0]
    for batch in batches:
        wanted, began_s, before = sink.answered + batch, process_time(), engine.steps
        for _ in range(batch):
            number += 1
            engine.submit(job(number, TOKENS))
        while sink.answered < wanted and fleet.clock.step():
            pass
        made = engine.steps - before
        steps.append({"batch": batch, "cpu_ms": (process_time() - began_s) / made * 1e3, "steps": made})
    for engine in fleet.engines:
        await engine.stop()
    return {"resident_mib": resident_mib(), "starts": starts, "steps": steps}


async def keeps_pace(instances: int, speed: float) -> Summary:
    """Return what came of 32 responses for each of so many instances, in real time."""
    tables = {
        "seer": {"engine": "paced", "plugins": ["divided_rollout", "context_sched"], "kv_pool": "none"},
        "engine": {
            "paced": {
                "instances": instances,
                "clock": "real",
                "speed": speed,
                "kv_capacity_tokens": 131_072,
                "preset": "h800-qwen2-vl-72b-tp8",
                "lengths": {"mean_tokens": TOKENS, "cap_tokens": 4 * TOKENS},
            }
        },
    }
    config = make_config(tables, base_dir=Path(), origin="paced_costs")
    prompt = tuple(range(3, PROMPT_TOKENS + 3))
    groups = [
        PromptGroup(f"g{number}", (3 + number, *prompt[1:]), 8, 4 * TOKENS, seed=number)
        for number in range(4 * instances)
    ]
    async with Runtime(assemble(config), config.seer, config.rollout) as runtime:
        return (await runtime.rollout(groups).wait()).summary


def largest(speed: float, most: int) -> list[dict[str, Any]]:
    """Double the instances until their pace is not kept, or there are ``most``; return each round's row."""
    rows: list[dict[str, Any]] = []
    instances = 1
    while instances <= most:
        summary = asyncio.run(keeps_pace(instances, speed))
        valid = "pace" not in summary.troubles
        rows.append({"instances": instances, "valid": valid, "overrun_share": summary.overrun_share})
        print(
            f"{instances} instances at speed {speed:g}: {summary.total_time_s:.1f} emulated seconds,"
            f" overran by {summary.overrun_share:.2%}{'' if valid else ', NOT VALID'}",
            flush=True,
        )
        if not valid:
            break
        instances *= 2
    return rows


def main(argv: Sequence[str]) -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example:\n  python benchmarks/paced_costs.py --instances 4\n"
        "  python benchmarks/paced_costs.py --real",
    )
    parser.add_argument("--instances", type=int, default=4)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 64, 128])
    parser.add_argument("--real", action="store_true", help="how many instances real time allows")
    parser.add_argument("--speed", type=float, default=1.0, help="with --real: emulated seconds in one")
    parser.add_argument("--most", type=int, default=64, help="with --real: instances at most")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args(argv)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    if arguments.real:
        rows = largest(arguments.speed, arguments.most)
        print(f"reproduce: {shlex.join(['python', 'benchmarks/paced_costs.py', *argv])}")
        if arguments.json:
            arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
        return
    found = asyncio.run(measure(arguments.instances, arguments.batch))
    for number, start in enumerate(found["starts"]):
        print(f"instance {number}: {start['cpu_s']:.1f} s of CPU, {start['mib']:.0f} MiB")
    for step in found["steps"]:
        each_us = step["cpu_ms"] / step["batch"] * 1e3
        print(f"batch {step['batch']}: {step['cpu_ms']:.2f} ms of CPU a step, {each_us:.0f} us a request")
    print(f"{found['resident_mib']:.0f} MiB in all")
    print(f"reproduce: {shlex.join(['python', 'benchmarks/paced_costs.py', *argv])}")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
