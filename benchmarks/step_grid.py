"""Starts with drafts: how long are they, and how far off are steps between the sizes that one measures?

An instance that drafts without a profile measures the steps of 1, 4, 16, 64, ... requests when it starts, and
interpolates.  This starts one instance of each engine without drafts and with them, --repeat times.  The one
with them then measures the powers of two in between as well, and each is compared with what the others say
of it.

  python benchmarks/step_grid.py --engine vllm sglang --repeat 3 --json out/step_grid.json
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import time
from pathlib import Path
from typing import Any

import msgspec
import structlog
from equality import EXAMPLE
from kv_rollouts import Row, shown, spread

from seer_core.config import load_config
from seer_core.drafting import StepTimes
from seer_core.runtime import Runtime

DRAFT_TOKENS = (0, 1, 2, 4, 8)


async def start(engine: str, plugins: tuple[str, ...], options: argparse.Namespace) -> Row:
    """Start an instance, and measure its steps if it drafts."""
    overrides = [
        f"seer.engine={engine}",
        f"engine.{engine}.instances=1",
        f"engine.{engine}.max_running={options.max_running}",
        *options.set,
    ]
    runtime = Runtime.from_config(load_config(EXAMPLE / "demo.toml", overrides).with_plugins(plugins))
    begun_s = time.monotonic()
    async with runtime:
        found: dict[str, Any] = {"start_s": time.monotonic() - begun_s}
        if plugins:
            batch = [1 << power for power in range(options.max_running.bit_length())]
            [instance] = runtime.fleet.engines.values()
            found["off"] = between(await instance.measure_steps(batch, DRAFT_TOKENS))
    return found


def between(fine: StepTimes) -> list[float]:
    """Return by what share interpolation is off for each size that a start does not measure."""
    last = len(fine.batch) - 1
    kept = [row for row in range(len(fine.batch)) if row % 2 == 0 or row == last]
    coarse = StepTimes(
        tuple(fine.batch[row] for row in kept), fine.draft_tokens, tuple(fine.seconds[row] for row in kept)
    )
    return [
        coarse.at(fine.batch[row], tokens) / seconds - 1
        for row in range(len(fine.batch))
        if row not in kept
        for tokens, seconds in zip(fine.draft_tokens, fine.seconds[row], strict=True)
    ]


async def main(options: argparse.Namespace) -> list[Row]:
    """Start every engine in turn."""
    rows = []
    for engine in options.engine:
        plain_s, drafting_s, off = [], [], []
        for _ in range(options.repeat):
            plain_s.append((await start(engine, (), options))["start_s"])
            drafting = await start(engine, ("grouped_spec",), options)
            drafting_s.append(drafting["start_s"])
            off += drafting["off"]
            print(
                f"{engine}: {plain_s[-1]:.1f} s without drafts, {drafting_s[-1]:.1f} s with them", flush=True
            )
        rows.append(
            {
                "engine": engine,
                "start_s": spread(plain_s),
                "start_with_drafts_s": spread(drafting_s),
                "off": spread(off),
                "mean_off": sum(map(abs, off)) / len(off),
            }
        )
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", nargs="+", default=["vllm", "sglang"], help="(default vllm and sglang)")
    parser.add_argument("--max-running", type=int, default=128, help="requests of a step (default 128)")
    parser.add_argument("--repeat", type=int, default=3, help="starts of each (default 3)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as for seer run")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows as JSON")
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    rows = asyncio.run(main(arguments))
    for row in rows:
        print(
            f"{row['engine']}: start {shown(row['start_s'])} s, with drafts"
            f" {shown(row['start_with_drafts_s'])} s; steps between the sizes measured are off by"
            f" {row['mean_off']:.0%}, from {row['off']['least']:+.0%} to {row['off']['most']:+.0%}"
        )
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(rows)) + b"\n")
