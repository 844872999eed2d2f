"""What an instance costs: its start, its memory, its steps, and a request that moves to it.

Starts one instance of each engine, one after the other, --repeat times, and reports

  start     seconds until it takes chunks, its self-test and its own measurements included
  memory    of its process: PSS shares what processes have in common among them, USS leaves it out; KV memory
            is part of both as far as it has been touched
  steps     milliseconds of a step that decodes 1, 8 or 32 requests
  moves     what the instance measured at its start: microseconds to prefill a token, milliseconds that a
            chunk whose KV is there delays the others by

  python benchmarks/engine_costs.py --engine vllm sglang --repeat 3 --json out/engine_costs.json
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
from seer_core.errors import EngineError
from seer_core.runtime import Runtime

BATCH = (1, 8, 32)


def memory_mib(pid: int) -> dict[str, float]:
    """Return PSS and USS of a process and its children, in MiB."""
    kib = dict.fromkeys(("pss", "uss"), 0)
    for each in [pid, *_children(pid)]:
        lines = Path(f"/proc/{each}/smaps_rollup").read_text().splitlines()[1:]
        fields = {name: int(value.split()[0]) for name, _, value in (line.partition(":") for line in lines)}
        kib["pss"] += fields["Pss"]
        kib["uss"] += fields["Private_Clean"] + fields["Private_Dirty"]
    return {name: value / 1024 for name, value in kib.items()}


def _children(pid: int) -> list[int]:
    direct = [
        int(child)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for child in (task / "children").read_text().split()
    ]
    return [*direct, *(further for child in direct for further in _children(child))]


async def start(engine: str, options: argparse.Namespace) -> dict[str, float]:
    """Start an instance, look at it, and stop it."""
    overrides = [f"seer.engine={engine}", f"engine.{engine}.instances=1", "seer.kv_pool=none", *options.set]
    runtime = Runtime.from_config(load_config(EXAMPLE / "demo.toml", overrides).with_plugins(()))
    begun_s = time.monotonic()
    async with runtime:
        figures = {"start_s": time.monotonic() - begun_s}
        [(name, info)] = runtime.living.items()
        instance: Any = runtime.fleet.engines[name]
        figures |= {f"{kind}_mib": value for kind, value in memory_mib(instance.worker.pid).items()}
        for batch in BATCH:
            try:
                times = await instance.measure_steps((batch,), (0,))
            except EngineError:
                continue
            figures[f"step_{batch}_ms"] = times.seconds[0][0] * 1e3
        figures["prefill_us_per_token"] = info.prefill_s_per_token * 1e6
        figures["chunk_ms"] = info.chunk_s * 1e3
        figures["chunk_us_per_token"] = info.chunk_s_per_token * 1e6
    return figures


async def main(options: argparse.Namespace) -> list[Row]:
    """Start every engine in turn."""
    found: dict[str, list[dict[str, float]]] = {engine: [] for engine in options.engine}
    for _ in range(options.repeat):
        for engine, figures in found.items():
            figures.append(await start(engine, options))
            print(engine, {name: round(value, 2) for name, value in figures[-1].items()}, flush=True)
    return [
        {"engine": engine, **{name: spread(each[name] for each in figures) for name in figures[0]}}
        for engine, figures in found.items()
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", nargs="+", default=["vllm", "sglang"], help="(default vllm and sglang)")
    parser.add_argument("--repeat", type=int, default=3, help="starts of each (default 3)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as for seer run")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows as JSON")
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    rows = asyncio.run(main(arguments))
    for figure in rows[0]:
        if figure != "engine":
            print(f"{figure:22}", *(f"{row['engine']} {shown(row[figure], 2)}" for row in rows))
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(rows)) + b"\n")
