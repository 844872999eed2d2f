"""A fleet of vLLM and SGLang together, beside two instances of each alone: time, and the same tokens?

Rolls the tiny reasoner's prompts out under full Seer on two instances of vLLM, on two of SGLang, and on one
of each, in turned order, --repeat times.  Every response is compared with the first fleet's, token by token.

  python benchmarks/mixed_fleet.py --groups 24 --repeat 3 --json out/mixed_fleet.json
"""

from __future__ import annotations

import argparse
import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import structlog
from kv_rollouts import Row, shown, spread

from seer_core.config import load_config
from seer_core.model import Completion, PromptGroup
from seer_core.prompts import read_prompts
from seer_core.runtime import Runtime

EXAMPLE = Path(__file__).parents[1] / "examples" / "tiny_reasoner"
PLUGINS = ("divided_rollout", "context_sched", "grouped_spec")
FLEETS = {"vllm, vllm": ["vllm"], "sglang, sglang": ["sglang"], "vllm, sglang": ["vllm", "sglang"]}


def settings(kinds: list[str]) -> list[str]:
    """Two instances in all, that measure their own steps."""
    named = ", ".join(f'"{kind}"' for kind in kinds)
    return [
        f"seer.engine=[{named}]",
        *(f"engine.{kind}.instances={2 // len(kinds)}" for kind in kinds),
        'plugin.grouped_spec.profile=""',
    ]


async def roll_out(
    runtime: Runtime, groups: Sequence[PromptGroup]
) -> tuple[dict[str, float], dict[str, Completion]]:
    """Return what a rollout took, and its completions by request."""
    await runtime.reset_caches()
    rollout = runtime.rollout(groups)
    found = {completion.request_id: completion async for completion in rollout}
    summary = rollout.result.summary
    where = Counter(chunk.instance.split("-")[0] for one in found.values() for chunk in one.chunks)
    return {
        "total_s": summary.total_time_s,
        "tail_s": summary.tail_time_s,
        "tokens_per_s": summary.throughput_tokens_per_s,
        "sglang_chunks": where["sglang"] / where.total(),
    }, found


async def main(options: argparse.Namespace) -> list[Row]:
    """Measure every fleet."""
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in FLEETS}
    differing = dict.fromkeys(FLEETS, 0)
    expected: dict[str, Completion] = {}
    async with AsyncExitStack() as stack:
        runtimes = {}
        for name, kinds in FLEETS.items():
            config = load_config(EXAMPLE / "demo.toml", [*settings(kinds), *options.set])
            runtime = Runtime.from_config(config.with_plugins(PLUGINS))
            runtimes[name] = await stack.enter_async_context(runtime)
        fleet = runtime.fleet
        read = read_prompts(EXAMPLE / "prompts.jsonl", config.rollout, fleet.model, fleet.tokenizer)
        for number in range(options.repeat):
            names = list(FLEETS)
            for name in names[number % 3 :] + names[: number % 3]:
                figures, found = await roll_out(runtimes[name], read.groups[: options.groups])
                rounds[name].append(figures)
                expected = expected or found
                differing[name] += sum(
                    one.token_ids != expected[request].token_ids for request, one in found.items()
                )
                print(f"round {number + 1}  {name:15}", figures, flush=True)
    return [
        {
            "fleet": name,
            **{figure: spread(each[figure] for each in measured) for figure in measured[0]},
            "differing_responses": differing[name],
        }
        for name, measured in rounds.items()
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--groups", type=int, default=24, help="prompt groups of 8 (default 24)")
    parser.add_argument("--repeat", type=int, default=3, help="rounds (default 3)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as for seer run")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows as JSON")
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    rows = asyncio.run(main(arguments))
    for row in rows:
        print(
            f"{row['fleet']:15} total {shown(row['total_s'], 1)} s  tail {shown(row['tail_s'], 1)} s"
            f"  {shown(row['tokens_per_s'], 0)} tok/s  chunks on SGLang {shown(row['sglang_chunks'], 2)}"
            f"  differing responses: {row['differing_responses']}"
        )
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(rows)) + b"\n")
