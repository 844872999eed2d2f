"""Chunk overhead: what dividing costs on one unloaded instance, against undivided requests.

Rolls out a few groups of the tiny reasoner, all in flight at once, whole and in chunks, in turn, --repeat
times, and reports each chunk size's time as a ratio to the whole one's of the same round.  Of several engines
each has an instance, and they take turns as well.

  python benchmarks/chunk_overhead.py --repeat 5 --json out/chunk_overhead.json
  python benchmarks/chunk_overhead.py --engine vllm sglang --chunks 64 256
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import structlog

from seer_core.config import load_config
from seer_core.figures import ratios, spread
from seer_core.plugins import fill_slots
from seer_core.prompts import read_prompts
from seer_core.runtime import Runtime

EXAMPLE = Path(__file__).parents[1] / "examples" / "tiny_reasoner"


async def main(options: argparse.Namespace) -> list[dict[str, object]]:
    """Measure every chunk size on every engine in every round."""
    sizes = [0, *options.chunks]
    times: dict[tuple[str, int], list[float]] = {
        (engine, size): [] for engine in options.engine for size in sizes
    }
    async with AsyncExitStack() as stack:
        runtimes = {}
        for engine in options.engine:
            config = load_config(
                EXAMPLE / "demo.toml",
                [
                    f"seer.engine={engine}",
                    f"engine.{engine}.instances=1",
                    f"engine.{engine}.kv_cache_bytes=268435456",
                ],
            )
            runtimes[engine] = Runtime.from_config(config.with_plugins(()))
            stack.push_async_exit(runtimes[engine])
        await asyncio.gather(*(runtime.start() for runtime in runtimes.values()))
        fleet = runtimes[engine].fleet
        read = read_prompts(EXAMPLE / "prompts.jsonl", config.rollout, fleet.model, fleet.tokenizer)
        groups = read.groups[: options.groups]
        for number in range(options.repeat + 1):
            for (engine, size), taken in times.items():
                runtime = runtimes[engine]
                plugins = ("divided_rollout",) if size else ()
                chosen = msgspec.structs.replace(
                    config, plugin={"divided_rollout": {"chunk_tokens": size or 1}}
                )
                await runtime.reset_caches()
                await runtime.use(fill_slots(chosen.with_plugins(plugins)))
                summary = (await runtime.rollout(groups).wait()).summary
                if number:  # the first round warms up
                    taken.append(summary.total_time_s / summary.tokens)
            print(f"round {number} of {options.repeat}", file=sys.stderr, flush=True)
    rows = []
    for (engine, size), taken in times.items():
        ratio = spread(ratios(taken, times[engine, 0]))
        rows.append(
            {
                "engine": engine,
                "chunk_tokens": size or None,
                "tokens_per_s": 1 / spread(taken).median,
                "time_ratio_to_whole": ratio.median,
                "least": ratio.least,
                "most": ratio.most,
                "repeats": options.repeat,
            }
        )
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", nargs="+", default=["vllm"], help="engines (default vllm)")
    parser.add_argument("--chunks", type=int, nargs="+", default=[64, 256, 1024], help="chunk sizes, tokens")
    parser.add_argument("--groups", type=int, default=2, help="groups of 8, all in flight (default 2)")
    parser.add_argument("--repeat", type=int, default=5, help="measured rounds (default 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows as JSON")
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    result = asyncio.run(main(arguments))
    for row in result:
        name = f"chunks of {row['chunk_tokens']}" if row["chunk_tokens"] else "whole"
        print(
            f"{row['engine']:7} {name:15} {row['tokens_per_s']:8,.0f} tok/s"
            f"   time x{row['time_ratio_to_whole']:.3f} [{row['least']:.3f}, {row['most']:.3f}]"
        )
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(result)) + b"\n")
