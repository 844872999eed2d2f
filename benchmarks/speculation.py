"""Speculation by batch size: grouped drafts, and an engine's own, against none, on real instances.

Keeps exactly --batch requests of the tiny reasoner in flight (until fewer are left), with every drafter in
turn, --repeat times, and reports each one's tokens per second as a ratio to no drafts of the same round.
Every response is compared with the one without drafts, token by token.

A drafter is a plug-in; on SGLang, with the number of paths that are verified at once; or ``sglang_ngram``:
SGLang's own n-grams.

  python benchmarks/speculation.py --batch 1 8 32 --repeat 3 --json out/speculation.json
  python benchmarks/speculation.py --engine sglang --drafters grouped_spec/1 grouped_spec/4 sglang_ngram
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import attrs
import msgspec
import structlog
from sglang_ngram import NODES, NgramDrafter

from seer_core.config import load_config
from seer_core.figures import ratios, spread
from seer_core.model import InstanceStatus, PromptGroup, Request
from seer_core.plugins import Strategies, assemble
from seer_core.prompts import read_prompts
from seer_core.result import Summary
from seer_core.runtime import Runtime
from seer_core.scheduler import Policies, Slot

EXAMPLE = Path(__file__).parents[1] / "examples" / "tiny_reasoner"
Row = dict[str, Any]
NONE = "none"
SGLANG_NGRAM = "sglang_ngram"


class AtMost:
    """Placer that keeps ``batch`` requests in flight on the only instance."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def instance_changed(self, instance: InstanceStatus) -> None:
        """Loads are read when placing."""

    def instance_lost(self, instance: InstanceStatus) -> None:
        """Loads are read when placing."""

    def place(
        self, request: Request, chunk_tokens: int, instances: Sequence[InstanceStatus]
    ) -> InstanceStatus | None:
        """Return the instance while it has fewer."""
        return instances[0] if instances[0].running < self.batch else None


def runtime_of(way: str, options: argparse.Namespace) -> Runtime:
    """Return a runtime with one instance that drafts in this way."""
    drafter, _, paths = way.partition("/")
    tables = [
        f"seer.engine={options.engine}",
        f"engine.{options.engine}.instances=1",
        f"engine.{options.engine}.kv_cache_bytes=268435456",
        "seer.kv_pool=none",
        *options.set,
    ]
    if paths or drafter == SGLANG_NGRAM:
        tables.append(f"engine.{options.engine}.draft_paths={paths or NODES}")
    config = load_config(EXAMPLE / "demo.toml", tables)
    if drafter != SGLANG_NGRAM:
        return Runtime.from_config(config.with_plugins(() if drafter == NONE else (drafter,)))
    assembly = assemble(config.with_plugins(()))
    slot = Slot("drafter", drafter, NgramDrafter())
    assembly = attrs.evolve(assembly, strategies=attrs.evolve(assembly.strategies, drafter=slot))
    return Runtime(assembly, config.seer, config.rollout)


async def main(options: argparse.Namespace) -> list[Row]:
    """Measure every drafter at every batch size in every round, on engines that stay up."""
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)  # where workers find ``sglang_ngram``
    runs: dict[tuple[int, str], list[Summary]] = {}
    differing: dict[tuple[int, str], int] = {}
    async with AsyncExitStack() as stack:
        runtimes = {name: runtime_of(name, options) for name in (NONE, *options.drafters)}
        for runtime in runtimes.values():
            stack.push_async_exit(runtime)
        await asyncio.gather(*(runtime.start() for runtime in runtimes.values()))
        print(f"started {', '.join(runtimes)}", file=sys.stderr, flush=True)
        first = runtimes[NONE]
        model, tokenizer = first.fleet.model, first.fleet.tokenizer
        read = read_prompts(EXAMPLE / "prompts.jsonl", first.defaults, model, tokenizer)
        for batch in options.batch:
            groups = [
                msgspec.structs.replace(group, max_tokens=min(group.max_tokens, options.max_tokens))
                for group in read.groups[: max(1, min(len(read.groups), -(-batch * options.rounds // 8)))]
            ]
            for number in range(options.repeat + 1):
                expected: dict[str, list[int]] = {}
                for name, runtime in runtimes.items():
                    summary, tokens = await roll_out(runtime, groups, batch)
                    expected = expected or tokens
                    wrong = sum(tokens[each] != expected[each] for each in expected)
                    differing[batch, name] = max(differing.get((batch, name), 0), wrong)
                    if number:  # the first round warms up
                        runs.setdefault((batch, name), []).append(summary)
                print(f"batch {batch}: round {number} of {options.repeat}", file=sys.stderr, flush=True)
            rows = rows_of(runs, differing, options)
            for row in rows:
                if row["batch"] == batch:
                    report(row)
            if options.json:
                options.json.parent.mkdir(parents=True, exist_ok=True)
                options.json.write_bytes(msgspec.json.format(msgspec.json.encode(rows)) + b"\n")
    return rows


def rows_of(
    runs: dict[tuple[int, str], list[Summary]],
    differing: dict[tuple[int, str], int],
    options: argparse.Namespace,
) -> list[Row]:
    """Return a row for each batch size and drafter."""
    rows: list[Row] = []
    for (batch, name), summaries in runs.items():
        speeds, plain = (
            [each.throughput_tokens_per_s for each in each_way] for each_way in (summaries, runs[batch, NONE])
        )
        ratio = spread(ratios(speeds, plain))
        rows.append(
            {
                "engine": options.engine,
                "batch": batch,
                "drafter": name,
                "tokens": summaries[0].tokens,
                "tokens_per_s": spread(speeds).median,
                "throughput_ratio_to_none": ratio.median,
                "least": ratio.least,
                "most": ratio.most,
                "acceptance_length": spread(each.acceptance_length for each in summaries).median,
                "accepted_of_drafted": spread(
                    each.accepted_tokens / max(1, each.drafted_tokens) for each in summaries
                ).median,
                "drafting_share": spread(each.drafting_share for each in summaries).median,
                "differing_responses": differing[batch, name],
                "repeats": options.repeat,
            }
        )
    return rows


def report(row: Row) -> None:
    """Print a row."""
    print(
        f"B={row['batch']:<4} {row['drafter']:14} {row['tokens_per_s']:8,.0f} tok/s"
        f"  x{row['throughput_ratio_to_none']:.3f} [{row['least']:.3f}, {row['most']:.3f}]"
        f"  {row['acceptance_length']:.2f} tokens a step  accepted {row['accepted_of_drafted']:.0%}"
        f"  drafting {row['drafting_share']:.1%}  differing: {row['differing_responses']}",
        flush=True,
    )


async def roll_out(
    runtime: Runtime, groups: list[PromptGroup], batch: int
) -> tuple[Summary, dict[str, list[int]]]:
    """Roll out with ``batch`` requests in flight, caches and draft context cold."""
    placer = Slot("placer", "benchmark", AtMost(batch))
    strategies = Strategies(Policies(placer=placer), (), runtime.fleet.drafter)
    await runtime.use(strategies)
    await runtime.reset_caches()
    result = await runtime.rollout(groups).wait()
    return result.summary, {each.request_id: each.token_ids for each in result.completions}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", default="vllm", help="plug-in that makes the engines (default vllm)")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32], help="requests in flight")
    parser.add_argument(
        "--drafters",
        nargs="+",
        default=["grouped_spec", "vllm_ngram", "vllm_suffix"],
        help="plug-ins to compare with no drafts",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=4,
        help="responses per request in flight, at least one group (default 4)",
    )
    parser.add_argument(
        "--max-tokens", type=int, default=3072, help="longest response (default 3072, the prompts' own)"
    )
    parser.add_argument("--repeat", type=int, default=3, help="measured rounds (default 3)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as for seer run")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows as JSON")
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    result = asyncio.run(main(arguments))
    sys.exit(any(row["differing_responses"] for row in result))
