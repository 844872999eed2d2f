"""What do drafts gain by batch size: grouped drafts, and an engine's own, against none, on real instances?

Keeps exactly --batch requests of the tiny reasoner in flight (until fewer are left), with every drafter in
turn, and reports each one's tokens per second as a ratio to no drafts in the same round.  Every response is
compared with the one without drafts, token by token.  A drafter is a plug-in; on SGLang, with the number
of paths that are verified at once: grouped_spec/4.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack

import msgspec
from seer_cli.stats import ratios

from bench.frame import EXAMPLE, Row, cell, markdown, prompts, spread_of, turned
from bench.placers import AtMost
from seer_core.model import PromptGroup
from seer_core.model.results import Summary
from seer_core.plugins.config import load_config
from seer_core.plugins.loading import Strategies
from seer_core.runtime.runtime import Runtime
from seer_core.scheduling.scheduler import Policies, Slot

ROOMS = ("seer_core", "backends/worker", "backends/vllm", "backends/sglang", "plugins/grouped_spec")
ROUNDS = 3

NONE = "none"


def options(parser: argparse.ArgumentParser) -> None:
    """Add the case's own options."""
    parser.add_argument("--engine", default="vllm", help="plug-in that makes the engines (default vllm)")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32], help="requests in flight")
    parser.add_argument(
        "--drafters",
        nargs="+",
        default=["grouped_spec", "vllm_ngram", "vllm_suffix"],
        help="plug-ins to compare with no drafts",
    )
    parser.add_argument(
        "--per-slot",
        type=int,
        default=4,
        help="responses per request in flight, at least a group (default 4)",
    )
    parser.add_argument("--max-tokens", type=int, default=3072, help="longest response (default 3072)")


def runtime_of(way: str, options: argparse.Namespace) -> Runtime:
    """Return a runtime with one instance that drafts in this way."""
    drafter, _, paths = way.partition("/")
    table = f"engine.{options.engine}"
    overrides = [f"seer.engine={options.engine}", f"{table}.instances=1", f"{table}.kv_cache_bytes=268435456"]
    overrides += ["seer.kv_pool=none", *options.set, *([f"{table}.draft_paths={paths}"] if paths else [])]
    config = load_config(EXAMPLE / "demo.toml", overrides)
    return Runtime.from_config(config.with_plugins(() if drafter == NONE else (drafter,)))


async def run(options: argparse.Namespace) -> list[Row]:
    """Measure every drafter at every batch size in every round, on engines that stay up."""
    ways = (NONE, *options.drafters)
    rows: list[Row] = []
    async with AsyncExitStack() as stack:
        runtimes = {way: await stack.enter_async_context(runtime_of(way, options)) for way in ways}
        for batch in options.batch:
            records = prompts(max(1, -(-batch * options.per_slot // 8)))
            groups = [
                msgspec.structs.replace(group, max_tokens=min(group.max_tokens, options.max_tokens))
                for group in runtimes[NONE].groups(records, iteration=0)
            ]
            runs: dict[str, list[Summary]] = {way: [] for way in ways}
            texts: dict[str, dict[str, list[int]]] = {}
            differing = dict.fromkeys(ways, 0)
            for number, way in turned(ways, options.rounds, warm_up=1):
                summary, tokens = await roll_out(runtimes[way], groups, batch)
                expected = texts.setdefault(NONE, tokens)
                differing[way] = max(differing[way], sum(tokens[each] != expected[each] for each in expected))
                if number >= 0:
                    runs[way].append(summary)
                print(f"batch {batch}, round {number + 1}, {way}", file=sys.stderr, flush=True)
            rows += [row_of(way, batch, runs[way], runs[NONE], differing[way]) for way in ways]
    return [{"engine": options.engine, **row} for row in rows]


def row_of(way: str, batch: int, mine: Sequence[Summary], plain: Sequence[Summary], differing: int) -> Row:
    """Return the figures of a drafter at a batch size."""
    speeds, base = ([each.throughput_tokens_per_s for each in runs] for runs in (mine, plain))
    return {
        "batch": batch,
        "drafter": way,
        "tokens": mine[0].tokens,
        "tokens_per_s": spread_of(speeds),
        "throughput_to_none": spread_of(ratios(speeds, base)),
        "acceptance_length": spread_of(each.acceptance_length for each in mine),
        "accepted_of_drafted": spread_of(each.accepted_tokens / max(1, each.drafted_tokens) for each in mine),
        "drafting_share": spread_of(each.drafting_share for each in mine),
        "differing_responses": differing,
    }


def table(rows: Sequence[Row]) -> str:
    """Return one line for each batch size and drafter."""
    columns = ["requests in flight", "drafter", "tokens per second", "ratio to no drafts"]
    columns += [
        "tokens per request and step",
        "accepted of drafted",
        "time spent drafting",
        "responses that differ",
    ]
    lines = [
        [
            f"{row['batch']}",
            row["drafter"],
            cell(row["tokens_per_s"], ",.0f"),
            cell(row["throughput_to_none"], ".2f"),
            f"{row['acceptance_length']['median']:.2f}",
            f"{row['accepted_of_drafted']['median']:.0%}",
            f"{row['drafting_share']['median']:.1%}",
            f"{row['differing_responses']}",
        ]
        for row in rows
    ]
    return markdown(columns, lines, left=2)


async def roll_out(
    runtime: Runtime, groups: list[PromptGroup], batch: int
) -> tuple[Summary, dict[str, list[int]]]:
    """Roll out with ``batch`` requests in flight, caches and draft context cold."""
    placer = Slot("placer", "benchmark", AtMost(batch))
    strategies = Strategies(Policies(placer=placer), (), runtime.drafter)
    await runtime.use(strategies)
    await runtime.reset_caches()
    result = await runtime.rollout(groups).wait()
    return result.summary, {each.request_id: each.token_ids for each in result.completions}
