"""What dynamic sampling costs: in rounds, as trainers do it, or with each group replaced at once (simulated).

The workload is Qwen2-VL-72B's, smaller by ``--scale``.  A group's responses are right with a chance of its
own: for ``--easy`` of the groups it is 0 or 1, half of them each, for the others it is uniform.  So nearly
half of all groups teach nothing.  All ways meet the same prompts with the same responses, and stop with a
full batch.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import shlex
import sys
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from random import Random
from typing import Any

import structlog
from seer_lab.policies import POLICIES
from seer_lab.workloads import WORKLOADS, scaled
from simulated import add_options, report

from seer_core import Completion, Runtime
from seer_core.config import Config, make_config
from seer_core.figures import spread
from seer_core.result import tail_time_s

sys.path.insert(0, str(Path(__file__).parents[1] / "examples/dynamic_sampling"))

from dynamic_sampling import fill_batch

BASE = "qwen2-vl-72b"
WAYS = ("a batch at a time", "what is missing at a time", "each at once")
POLICY = "context"


class Rewards:
    """Rewards of 0 or 1, with a chance of each group's own."""

    def __init__(self, seed: int, easy: float) -> None:
        self._seed, self._easy = seed, easy

    def __call__(self, completion: Completion) -> float:
        """Return the same reward for the same response, whenever asked."""
        group = Random(f"{self._seed} {completion.group_id}")
        chance = group.random()
        if group.random() < self._easy:
            chance = float(chance < 0.5)
        return float(Random(f"{self._seed} {completion.request_id}").random() < chance)


def make(arguments: argparse.Namespace, seed: int) -> tuple[Config, int, dict[str, Any]]:
    """Return a config, the groups of a batch and what each prompt says."""
    workload = scaled(WORKLOADS[BASE], arguments.scale)
    lengths: Any = workload.lengths
    sim = {
        **workload.tables["engine"]["sim"],
        "lengths": {
            "mean_tokens": lengths.mean_tokens,
            "sigma": lengths.sigma,
            "group_share": lengths.group_share,
            "cap_tokens": lengths.cap_tokens,
        },
    }
    seer = {**workload.tables["seer"], "plugins": list(POLICIES[POLICY].plugins), "seed": seed}
    tables = {**workload.tables, "seer": seer, "engine": {"sim": sim}}
    config = make_config(tables, arguments.set, base_dir=Path(), origin=f"workload {workload.name}")
    record = {"n": lengths.group_size, "max_tokens": lengths.cap_tokens, "prompt_token_ids": [7] * 512}
    return config, lengths.groups, record


async def in_rounds(
    runtime: Runtime, prompts: Iterator[dict[str, Any]], reward: Rewards, groups: int, whole: bool
) -> tuple[int, list[list[float]]]:
    """Fill a batch round by round; return the tokens generated and the finish times of each round."""
    found = tokens = 0
    rounds = []
    while found < groups:
        new = runtime.groups(list(islice(prompts, groups if whole else groups - found)), iteration=0)
        result = await runtime.rollout(new).wait()
        rewards: dict[str, set[float]] = {}
        for each in result.completions:
            rewards.setdefault(each.group_id, set()).add(reward(each))
        found += sum(len(seen) > 1 for seen in rewards.values())
        tokens += result.summary.tokens
        rounds.append([each.finished_s for each in result.completions])
    return tokens, rounds


async def fill(way: str, arguments: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Fill one batch and return what it took."""
    config, groups, record = make(arguments, seed)
    reward = Rewards(seed, arguments.easy)
    prompts = ({**record, "group_id": f"g{number}"} for number in count())
    async with Runtime.from_config(config) as runtime:
        if way == WAYS[2]:
            seen: list[Completion] = []

            def noted(completion: Completion) -> float:
                seen.append(completion)
                return reward(completion)

            await fill_batch(runtime, prompts, noted, groups)
            tokens, rounds = sum(len(each.token_ids) for each in seen), [[each.finished_s for each in seen]]
        else:
            tokens, rounds = await in_rounds(runtime, prompts, reward, groups, way == WAYS[0])
    return {
        "way": way,
        "seed": seed,
        "total_s": max(rounds[-1]),
        "tail_s": sum(tail_time_s(each) for each in rounds),
        "rounds": len(rounds),
        "responses": sum(map(len, rounds)),
        "tokens": tokens,
    }


def main() -> None:
    """Simulate, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser, 5, "how many batches")
    parser.add_argument("--scale", type=float, default=0.125, help="of the workload's groups and instances")
    parser.add_argument("--easy", type=float, default=0.4, help="share of groups that are all right or wrong")
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    rows = []
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
        for way in WAYS:
            rows.append(asyncio.run(fill(way, arguments, seed)))
            print(
                {key: round(value) if isinstance(value, float) else value for key, value in rows[-1].items()}
            )
    for way in WAYS:
        mine = [row for row in rows if row["way"] == way]
        told = []
        for key in ("total_s", "tail_s", "rounds", "responses"):
            each = spread(row[key] for row in mine)
            told.append(f"{key} {each.median:.0f} [{each.least:.0f}, {each.most:.0f}]")
        print(f"{way}: {', '.join(told)}")
    report(shlex.join(["python", *sys.argv]), rows, arguments.json)


if __name__ == "__main__":
    main()
