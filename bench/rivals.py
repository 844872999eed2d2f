"""Which scheduling is fastest on which lengths: ours, or what others have published?

No policy drafts.  The rivals are plug-ins (contrib/rivals): verl's KV-aware balancer, the order by the last
epoch's lengths, and tail isolation after TailSieve, which keeps one instance for the longest responses.  The
share of its KV that they may fill is in the row's name.  It gets true lengths, as `oracle` does, or the last
epoch's.  These are a group's own lengths drawn with repeats: the model has not changed in between.

The paper's workloads have the part of their groups and instances that is in their names: four instances, of
Kimi-K2 two.  Recorded lengths (not published, `--data` names their folder) run on four instances of
Qwen2-VL-72B at pressure 4.  Costs are fitted to the paper.  A name that ends `on qwen3-32b` is for the same
lengths on as many instances of Qwen3-32B on 4 H100 at pressure 4, whose costs are fitted to published
measurements (cost_models.md).  All are shrunk by the factor in
their names: contexts and KV are smaller, and a token of context costs as much more.  A round is a seed; of
recorded lengths it is one of three iterations, of dapo-32b of four, taken in turn.  The last row is what no
schedule without drafts can exceed: veRL's time over the bound.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace
from seer_cli.stats import ratios
from seer_lab.bound import bounds_of
from seer_lab.policies import POLICIES, PolicySet
from seer_lab.simulate import simulate
from seer_lab.workloads import CLUSTERS, WORKLOADS, Workload, crowded, scaled

from bench.harness import Row, cell, markdown, percent, spread_of
from bench.paced import MEASURED, PAPER, PRESSURE, recorded, shrunk

DEPENDS_ON = ("seer_core", "plugins", "backends/sim", "lab")
ROUNDS = 5
BASELINE, BOUND = "verl", "bound"
INSTANCES = 4
SHARES = (0.3, 0.5, 0.75)
OURS = ("divided", "context", "posterior")
RIVALS = ("kv-aware-sticky", "history", "tail-isolation-history 0.5")
"""Policies without true lengths, in the answer."""


def _policies() -> list[PolicySet]:
    """Return the policies by the names of their rows."""
    found = [POLICIES[name] for name in (BASELINE, "divided", "context", "posterior", "oracle")]
    found += [POLICIES[name] for name in ("kv-aware-sticky", "history")]
    for name, shares in (("tail-isolation", SHARES), ("tail-isolation-history", SHARES[1:2])):
        policy = POLICIES[name]
        for share in shares:
            overrides = (*policy.overrides, f"plugin.tail_isolation.share={share}")
            found.append(replace(policy, name=f"{name} {share}", overrides=overrides))
    return found


def _paper(name: str, scale: float, by: int, on: str) -> Callable[[Path], Workload]:
    load = scaled(WORKLOADS[name], scale)
    if on != PAPER:
        instances = load.tables["engine"]["sim"]["instances"]
        load = crowded(f"{load.name} on {on}", load.lengths, CLUSTERS[on], instances, PRESSURE)
    return lambda data: shrunk(load, by)


def _recorded(name: str, by: int, on: str) -> Callable[[Path], Workload]:
    return lambda data: recorded(data, name, INSTANCES, by, on)


CHOICES: Mapping[str, Callable[[Path], Workload]] = {
    name if on == PAPER else f"{name} on {on}": load
    for on in (PAPER, MEASURED)
    for name, load in (
        ("qwen2-vl-72b", _paper("qwen2-vl-72b", 0.25, 40, on)),
        ("moonlight", _paper("moonlight", 0.125, 40, on)),
        ("kimi-k2", _paper("kimi-k2", 0.25, 200, on)),
        ("deepcoder-14b", _recorded("deepcoder-14b", 4, on)),
        ("dapo-32b", _recorded("dapo-32b", 2, on)),
    )
}


def options(parser: argparse.ArgumentParser) -> None:
    """Add the case's own options."""
    parser.add_argument("--data", type=Path, help="folder with rollout_lengths.jsonl")
    parser.add_argument(
        "--workload", action="append", choices=CHOICES, help=f"may repeat (default: those not on {MEASURED})"
    )


def run(options: argparse.Namespace) -> list[Row]:
    """Simulate every workload under each policy, and solve for its bound."""
    rows: list[Row] = []
    for name in options.workload or [each for each in CHOICES if MEASURED not in each]:
        workload = CHOICES[name](options.data or Path())
        seconds: dict[str, list[float]] = {}
        for policy in _policies():
            for seed in range(options.rounds):
                took_s = simulate(workload, policy, seed, options.set).summary.total_time_s
                seconds.setdefault(policy.name, []).append(took_s)
            print(f"{workload.name}: {policy.name}", file=sys.stderr, flush=True)
        bounds = bounds_of(workload, [POLICIES[BASELINE]], range(options.rounds), options.set)
        seconds[BOUND] = [bounds[BASELINE, seed].total_time_s for seed in range(options.rounds)]
        rows.append(
            {
                "workload": workload.name,
                "policies": {
                    policy: {
                        "total_time_s": spread_of(took),
                        "ratio_to_first": spread_of(ratios(seconds[BASELINE], took)),
                    }
                    for policy, took in seconds.items()
                },
            }
        )
    return rows


def table(rows: Sequence[Row]) -> str:
    """Return one line for each policy with veRL's time over its own, one column for each workload."""
    lines = [
        [policy, *(cell(row["policies"][policy]["ratio_to_first"], ".2f") for row in rows)]
        for policy in rows[0]["policies"]
        if policy != BASELINE
    ]
    times = [cell(row["policies"][BASELINE]["total_time_s"], ",.0f", " s") for row in rows]
    return markdown(
        ["times veRL's speed", *(row["workload"] for row in rows)], [[f"{BASELINE}, time", *times], *lines]
    )


def answer(rows: Sequence[Row]) -> str:
    """Return what our best policy saves on each workload, and the best of others, without true lengths."""
    ours: list[float] = []
    others: list[float] = []
    for row in rows:
        for found, names in ((ours, OURS), (others, RIVALS)):
            found.append(max(row["policies"][name]["ratio_to_first"]["median"] for name in names))
    saved, theirs = (
        f"{percent(1 - 1 / min(found))} to {percent(1 - 1 / max(found))}" for found in (ours, others)
    )
    ahead = sum(mine > its for mine, its in zip(ours, others, strict=True))
    return (
        f"Without drafts and without true lengths, Seer's best policy takes {saved} less time than veRL's on"
        f" {len(rows)} workloads, and the best published one {theirs}. Seer's is ahead on {ahead} of them."
    )
