"""Is Seer's scheduling ever slower than veRL's policy, with half of each chunk reserved and with all of it?

Simulated instances without drafts, so that a gain is the scheduling's alone.  Workloads are those of the
case `paced`, lengths as they were recorded, and drawn lengths whose prompts are 1, 25 and 50 % of the mean
context.  Where a name ends in a number, contexts are smaller by that factor, and a token of context costs as
many times more.  There chunks are coarse, for a chunk has four blocks at least.

`length_posterior` is divided rollout with the plug-in of that name.  A ratio is veRL's total time over the
policy's, on the same lengths; the floor holds where the median is 0.99 or more.  Lengths of deepcoder-14b and
dapo-32b are not published: ``--data`` names the folder that has them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from seer_cli.stats import ratios
from seer_lab.policies import POLICIES, PolicySet
from seer_lab.simulate import simulate
from seer_lab.traces import read_lengths
from seer_lab.workloads import CLUSTERS, SYNTHETIC, Workload, crowded

from bench.frame import DATA, Row, cell, markdown
from bench.paced import LOADS as SHRUNK
from bench.paced import shrunk

ROOMS = ("seer_core", "plugins", "backends/sim", "lab", "bench/paced.py")
ROUNDS = 5
BASELINE = "verl"
FLOOR = 0.99
SHARE = "plugin.divided_rollout.reserved_share"
SHARES = (1.0, 0.5)
PRESSURE = 3.0
INSTANCES = 4
CLUSTER = CLUSTERS["qwen2-vl-72b"]
SHORTER = 4
"""How many times shorter the drawn contexts are than ``SYNTHETIC``'s."""

POLICY_SETS = {
    name: POLICIES.get(name) or PolicySet(name, ("divided_rollout", name))
    for name in ("divided", "context", "length_posterior")
}


def recorded(data: Path, name: str) -> Workload:
    """Return the recorded lengths of a workload, no context made shorter."""
    lengths = read_lengths(data / "rollout_lengths.jsonl", [f"workload={name}"])
    return crowded(name, lengths, CLUSTER, INSTANCES, PRESSURE)


def drawn(prompt_share: float) -> Workload:
    """Return drawn lengths with prompts of such a share of the mean context."""
    prompt_tokens = round(SYNTHETIC.mean_tokens * prompt_share / (1 - prompt_share))
    lengths = msgspec.structs.replace(SYNTHETIC, prompt_tokens=prompt_tokens)
    load = crowded(f"prompts {prompt_share:.0%}", lengths, CLUSTER, INSTANCES, PRESSURE)
    return shrunk(load, SHORTER)


LOADS: Mapping[str, Callable[[Path], Workload]] = {
    **{name: SHRUNK[name] for name in ("kimi-k2", "qwen2-vl-72b", "moonlight")},
    **{f"prompts-{percent}": lambda data, share=percent / 100: drawn(share) for percent in (1, 25, 50)},
    **{f"{name}-shrunk": SHRUNK[name] for name in ("deepcoder-14b", "dapo-32b")},
    **{name: lambda data, name=name: recorded(data, name) for name in ("deepcoder-14b", "dapo-32b")},
}


def options(parser: argparse.ArgumentParser) -> None:
    """Add the case's own options."""
    parser.add_argument("--only", nargs="+", choices=list(LOADS), default=list(LOADS))
    parser.add_argument("--data", type=Path, default=DATA.parent, help="folder of data that is not published")


def run(options: argparse.Namespace) -> list[Row]:
    """Simulate every workload under every policy; a round is a seed, which chooses the lengths."""
    rows = []
    for name in options.only:
        load = LOADS[name](options.data)
        for seed in range(options.rounds):
            rows.append(measured(load, POLICIES[BASELINE], seed, options.set))
            for policy in POLICY_SETS.values():
                for share in SHARES:
                    rows.append(measured(load, policy, seed, options.set, share))
            print(f"{name}, seed {seed}", file=sys.stderr, flush=True)
    return rows


def measured(
    load: Workload, policy: PolicySet, seed: int, overrides: Sequence[str], share: float | None = None
) -> Row:
    """Simulate one iteration, with ``share`` of each chunk reserved, and return its figures."""
    reserved = [] if share is None else [f"{SHARE}={share}"]
    summary = simulate(load, policy, seed, [*overrides, *reserved]).summary
    return {
        "case": load.name,
        "policy": policy.name,
        "seed": seed,
        "reserved_share": share,
        "total_time_s": summary.total_time_s,
        "preemptions": summary.preemptions,
        "chunks": summary.chunks,
        "tokens": summary.tokens,
    }


def speedups(rows: Sequence[Row]) -> dict[tuple[str, str, float], list[float]]:
    """Return veRL's time over a policy's, seed by seed, by workload, policy and what is reserved."""
    times: dict[Any, list[float]] = {}
    for row in rows:
        times.setdefault((row["case"], row["policy"], row["reserved_share"]), []).append(row["total_time_s"])
    return {
        (case, policy, share): ratios(times[case, BASELINE, None], mine)
        for (case, policy, share), mine in times.items()
        if policy != BASELINE
    }


def table(rows: Sequence[Row]) -> str:
    """Return a line for each workload and policy: with whole chunks reserved, and with half of each."""
    found = speedups(rows)
    chunks: dict[Any, list[Row]] = {}
    for row in rows:
        chunks.setdefault((row["case"], row["policy"], row["reserved_share"]), []).append(row)
    lines = []
    for case in dict.fromkeys(row["case"] for row in rows):
        for policy in POLICY_SETS:
            ratio = [cell(found[case, policy, share], ".3f", "x") for share in SHARES]
            counts = [
                cell([row["chunks"] for row in chunks[case, policy, share]], ",.0f") for share in SHARES
            ]
            lines.append([case, policy, *ratio, *counts])
    columns = ["workload", "policy", "whole chunks reserved", "half of each", "chunks", "with half"]
    return markdown(columns, lines, left=2)


def answer(rows: Sequence[Row]) -> str:
    """Return where each policy is least, and how often engines preempted."""
    found = speedups(rows)
    sentences = []
    for share, what in zip(SHARES, ("whole chunks", "half of each chunk"), strict=True):
        least = []
        for policy in POLICY_SETS:
            mine = {
                case: median(ratio)
                for (case, name, each), ratio in found.items()
                if (name, each) == (policy, share)
            }
            worst = min(mine, key=mine.__getitem__)
            least.append(f"{mine[worst]:.3f}x for `{policy}` ({worst})")
        sentences.append(f"With {what} reserved, the least median ratios are {', '.join(least)}.")
    below = sorted(
        f"{policy} on {case}"
        for (case, policy, share), ratio in found.items()
        if share == SHARES[-1] and median(ratio) < FLOOR
    )
    preempted = sum(row["preemptions"] for row in rows if row["policy"] != BASELINE)
    sentences.append(f"Below {FLOOR} with half reserved: {', '.join(below) or 'none'}.")
    sentences.append(f"Engines preempted {preempted} requests under divided rollout.")
    return " ".join(sentences)
