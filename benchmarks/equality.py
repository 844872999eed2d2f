"""Equality: whole = divided = migrated = killed = drafted, token for token, at temperature 0 and 1.

Rolls the tiny reasoner's prompts out on two real instances, of vLLM unless --set names another engine, in
these ways:

  whole     each response in one piece
  divided   in chunks of --chunk tokens, placed by free KV
  migrated  in chunks of --chunk tokens, every chunk on another instance than the one before
  killed    divided, and the first instance gets SIGKILL in mid-rollout
  drafted   divided, with grouped speculative decoding
  ngram     divided, with vLLM's n-gram drafts
  suffix    divided, with vLLM's suffix drafts

and compares every response with the first way's.

  python benchmarks/equality.py --groups 48 --json out/equality.json
  python benchmarks/equality.py --ways whole migrated killed --set seer.kv_pool=mooncake
  python benchmarks/equality.py --ways whole divided migrated killed drafted --set seer.engine=sglang
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import attrs
import msgspec
import structlog

from seer_core.config import load_config
from seer_core.model import Completion, InstanceStatus, PromptGroup, Request, Sampling
from seer_core.plugins import Strategies, fill_slots
from seer_core.prompts import read_prompts
from seer_core.runtime import Runtime
from seer_core.scheduler import Slot

EXAMPLE = Path(__file__).parents[1] / "examples" / "tiny_reasoner"
WAYS = ("whole", "divided", "migrated", "killed", "drafted", "ngram", "suffix")
DRAFTERS = {"drafted": "grouped_spec", "ngram": "vllm_ngram", "suffix": "vllm_suffix"}
KILL_AFTER = 0.4
"""Share of the responses that have finished when the kill comes."""


class Nomad:
    """Placer that never lets a request stay: the emptiest other instance on which the chunk fits."""

    def instance_changed(self, instance: InstanceStatus) -> None:
        """Loads are read when placing."""

    def instance_lost(self, instance: InstanceStatus) -> None:
        """Loads are read when placing."""

    def place(
        self, request: Request, chunk_tokens: int, instances: Sequence[InstanceStatus]
    ) -> InstanceStatus | None:
        """Return another instance than the request's last."""
        others = [
            instance
            for instance in instances
            if (instance.id != request.instance or len(instances) == 1)
            and instance.free_slots > 0
            and instance.footprint(request, chunk_tokens) <= instance.free_kv_tokens
        ]
        return max(others, key=lambda instance: (instance.free_kv_tokens, -instance.seq), default=None)


async def main(options: argparse.Namespace) -> list[dict[str, object]]:
    """Run all ways at both temperatures."""
    config = load_config(
        EXAMPLE / "demo.toml", [f"plugin.divided_rollout.chunk_tokens={options.chunk}", *options.set]
    )
    rows = []
    async with Runtime.from_config(config.with_plugins(())) as runtime:
        read = read_prompts(
            EXAMPLE / "prompts.jsonl", config.rollout, runtime.fleet.model, runtime.fleet.tokenizer
        )
        for temperature in options.temperatures:
            groups = [
                msgspec.structs.replace(
                    group,
                    n=group.n if temperature else options.greedy_n,
                    sampling=Sampling(temperature),
                )
                for group in read.groups[: options.groups]
            ]
            expected: dict[str, Completion] = {}
            for way in options.ways:
                divided = () if way == "whole" else ("divided_rollout", "context_sched")
                drafter = (DRAFTERS[way],) if way in DRAFTERS else ()
                strategies = fill_slots(config.with_plugins((*divided, *drafter)))
                if way == "migrated":
                    nomad = Slot("placer", "nomad", Nomad())
                    strategies = attrs.evolve(
                        strategies, policies=attrs.evolve(strategies.policies, placer=nomad)
                    )
                found, lost = await roll_out(runtime, strategies, groups, kill=way == "killed")
                expected = expected or found
                row = compare(way, temperature, expected, found)
                row["instances_lost"] = lost
                rows.append(row)
                print(
                    f"T={temperature:g} {way:9} {row['tokens']:>9,} tokens  {row['chunks']:>6,} chunks "
                    f" {row['migrations']:>6,} migrations  {row['accepted_tokens']:>8,} drafts accepted"
                    f"  {row['pool_tokens']:>9,} from the pool"
                    f"  differing responses: {row['differing_responses']}",
                    flush=True,
                )
    return rows


async def roll_out(
    runtime: Runtime, strategies: Strategies, groups: list[PromptGroup], *, kill: bool
) -> tuple[dict[str, Completion], int]:
    """Return the completions by request, and how many instances were lost."""
    await runtime.use(strategies)
    await runtime.reset_caches()
    found = {}
    total = sum(group.n for group in groups)
    rollout = runtime.rollout(groups)
    async for completion in rollout:
        found[completion.request_id] = completion
        if kill and len(found) == int(total * KILL_AFTER):
            pid = next(iter(runtime.fleet.engines.values())).worker.pid  # type: ignore[attr-defined]
            os.kill(pid, signal.SIGKILL)
    return found, rollout.result.summary.instances_lost


def compare(
    way: str, temperature: float, expected: dict[str, Completion], found: dict[str, Completion]
) -> dict[str, object]:
    """Compare two rollouts token by token."""
    pairs = [(expected[name], found[name]) for name in expected]
    differing = [(a, b) for a, b in pairs if a.token_ids != b.token_ids]
    same = [(a, b) for a, b in pairs if a.token_ids == b.token_ids]
    return {
        "way": way,
        "temperature": temperature,
        "responses": len(found),
        "tokens": sum(len(completion.token_ids) for completion in found.values()),
        "chunks": sum(len(completion.chunks) for completion in found.values()),
        "migrations": sum(
            here.instance != there.instance
            for completion in found.values()
            for here, there in zip(completion.chunks, completion.chunks[1:], strict=False)
        ),
        "pool_tokens": sum(each.pool_tokens for one in found.values() for each in one.chunks),
        "drafted_tokens": sum(sum(each.drafted_at) for one in found.values() for each in one.chunks),
        "accepted_tokens": sum(sum(each.accepted_at) for one in found.values() for each in one.chunks),
        "differing_responses": len(differing),
        "first_differences": [
            next(i for i, (x, y) in enumerate(zip(a.token_ids, b.token_ids, strict=False)) if x != y)
            for a, b in differing
        ],
        "largest_logprob_difference": max(
            (abs(x - y) for a, b in same for x, y in zip(a.logprobs, b.logprobs, strict=True)), default=0.0
        ),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--groups", type=int, default=48, help="prompt groups to roll out (default 48)")
    parser.add_argument(
        "--greedy-n", type=int, default=8, help="responses a group at temperature 0, all alike (default 8)"
    )
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0], help="(default 0 and 1)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="which, the first is expected")
    parser.add_argument("--chunk", type=int, default=64, help="chunk tokens (default 64)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as for seer run")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows as JSON")
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    result = asyncio.run(main(arguments))
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(result)) + b"\n")
    sys.exit(any(row["differing_responses"] for row in result))
