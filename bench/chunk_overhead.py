"""What does dividing cost on one unloaded instance, against undivided requests?

Rolls out a few groups of the tiny reasoner, all in flight at once, whole and in chunks, in turn, and reports
each chunk size's time as a ratio to that of the whole responses in the same round.  Each of several engines
has an instance, and they take turns as well.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from itertools import product

import msgspec
from seer_cli.stats import ratios

from bench.frame import EXAMPLE, Row, cell, markdown, prompts, spread_of, turned
from seer_core.plugins.config import load_config
from seer_core.plugins.loading import fill_slots
from seer_core.runtime.runtime import Runtime

ROOMS = ("seer_core", "backends/worker", "backends/vllm", "backends/sglang", "plugins/divided_rollout")
ROUNDS = 15


def options(parser: argparse.ArgumentParser) -> None:
    """Add the case's own options."""
    parser.add_argument("--engine", nargs="+", default=["vllm"], help="engines (default vllm)")
    parser.add_argument("--chunks", type=int, nargs="+", default=[64, 256, 1024], help="chunk sizes, tokens")
    parser.add_argument("--groups", type=int, default=2, help="groups of 8, all in flight (default 2)")


async def run(options: argparse.Namespace) -> list[Row]:
    """Measure every chunk size on every engine in every round."""
    arms = list(product(options.engine, [0, *options.chunks]))
    times: dict[tuple[str, int], list[float]] = {arm: [] for arm in arms}
    config = load_config(EXAMPLE / "demo.toml", options.set)
    async with AsyncExitStack() as stack:
        runtimes = {}
        for engine in options.engine:
            overrides = [f"seer.engine={engine}", f"engine.{engine}.instances=1"]
            overrides += [f"engine.{engine}.kv_cache_bytes=268435456", *options.set]
            own = load_config(EXAMPLE / "demo.toml", overrides)
            runtimes[engine] = await stack.enter_async_context(Runtime.from_config(own.with_plugins(())))
        for number, (engine, size) in turned(arms, options.rounds, warm_up=1):
            runtime = runtimes[engine]
            chosen = msgspec.structs.replace(config, plugin={"divided_rollout": {"chunk_tokens": size or 1}})
            await runtime.reset_caches()
            await runtime.use(fill_slots(chosen.with_plugins(("divided_rollout",) if size else ())))
            groups = runtime.groups(prompts(options.groups), iteration=0)
            summary = (await runtime.rollout(groups).wait()).summary
            if number >= 0:
                times[engine, size].append(summary.total_time_s / summary.tokens)
            print(f"round {number + 1}, {engine}, chunks of {size}", file=sys.stderr, flush=True)
    return [
        {
            "engine": engine,
            "chunk_tokens": size or None,
            "tokens_per_s": spread_of(1 / each for each in taken),
            "time_to_whole": spread_of(ratios(taken, times[engine, 0])),
        }
        for (engine, size), taken in times.items()
    ]


def table(rows: Sequence[Row]) -> str:
    """Return one line for each engine and size."""
    columns = ["engine", "chunks of", "tokens per second", "time, ratio to whole"]
    lines = [
        [
            row["engine"],
            f"{row['chunk_tokens']}" if row["chunk_tokens"] else "whole",
            cell(row["tokens_per_s"], ",.0f"),
            cell(row["time_to_whole"], ".2f"),
        ]
        for row in rows
    ]
    return markdown(columns, lines)
