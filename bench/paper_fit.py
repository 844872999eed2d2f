"""Which constants of the simulator give the figures of veRL in the paper?

Each row is a point of a grid: total and tail time of veRL there beside the paper's, and for Qwen2-VL-72B
preemptions, idle time and late starts as well, which determine the running limit and the memory for KV.
Nothing else of the paper is looked at.  The efficiency (the part of bandwidth and FLOP peaks that is
reached) scales all times alike: the grid leaves it alone and shows the one that the total asks for.
``--rounds`` are iterations.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import product
from math import sqrt
from statistics import fmean

import msgspec
from seer_lab.lengths import DrawnLengths
from seer_lab.paper.numbers import TIMES, VERL
from seer_lab.policies import POLICIES
from seer_lab.simulate import SimulatedIteration, simulate
from seer_lab.workloads import CLUSTERS, WORKLOADS, Workload
from seer_sim.cost import PRESETS, CostModel

from bench.frame import Row, markdown

ROOMS = ("seer_core", "plugins", "backends/sim", "lab")
ROUNDS = 5

SIGMAS = {
    "moonlight": (0.6, 0.7, 0.8, 1.0),
    "qwen2-vl-72b": (0.8, 0.9, 1.0, 1.2),
    "kimi-k2": (0.5, 0.6, 0.7, 0.8),
}
GROUP_SHARES = (0.7, 0.8, 0.9)
ENGINES = ((160, 0.75), (192, 0.8), (224, 0.85), (256, 0.8), (256, 0.9), (1024, 0.9))
"""Running limit of a rank, and the share of the memory that is for weights and KV."""


def with_lengths(workload: Workload, **changes: float) -> Workload:
    """Return the workload with other constants of its lengths."""
    assert isinstance(workload.lengths, DrawnLengths)
    return msgspec.structs.replace(workload, lengths=msgspec.structs.replace(workload.lengths, **changes))


def engines(name: str, limit: int, memory_share: float) -> list[str]:
    """Return the overrides with another running limit of each rank, and another memory share of each GPU."""
    cluster = CLUSTERS[name]
    ranks = cluster.max_running // CLUSTERS["moonlight"].max_running
    tokens = msgspec.structs.replace(cluster, memory_share=memory_share).kv_capacity_tokens
    return [f"engine.sim.max_running={limit * ranks}", f"engine.sim.kv_capacity_tokens={tokens}"]


def cost_of(workload: Workload) -> CostModel:
    """Return the workload's cost constants."""
    return PRESETS[workload.tables["engine"]["sim"]["preset"]]


def misfits(name: str, runs: Sequence[SimulatedIteration]) -> dict[str, float]:
    """Return the relative errors of what the paper says of veRL, its total apart."""
    total_s, tail_s = TIMES[name]["verl"]
    tail = fmean(run.summary.tail_time_s for run in runs) / fmean(run.summary.total_time_s for run in runs)
    found = {"tail over total": tail / (tail_s / total_s) - 1}
    if name == "qwen2-vl-72b":
        found["preemptions"] = fmean(run.summary.preemptions for run in runs) / VERL["preemptions"] - 1
        found["idle"] = fmean(run.idle_share for run in runs) / VERL["idle_share"] - 1
        found["late start"] = fmean(run.late_start_share for run in runs) / VERL["late_start"] - 1
    return found


def options(parser: argparse.ArgumentParser) -> None:
    """Add the workload."""
    parser.add_argument("workload", choices=list(TIMES))


def run(options: argparse.Namespace) -> list[Row]:
    """Simulate veRL at each point of the grid."""
    name, rows = options.workload, []
    for (limit, memory_share), group_share, sigma in product(ENGINES, GROUP_SHARES, SIGMAS[name]):
        workload = with_lengths(WORKLOADS[name], sigma=sigma, group_share=group_share)
        overrides = [*engines(name, limit, memory_share), *options.set]
        runs = [simulate(workload, POLICIES["verl"], seed, overrides) for seed in range(options.rounds)]
        ratio = fmean(run.summary.total_time_s for run in runs) / TIMES[name]["verl"][0]
        rows.append(
            {
                "limit": limit,
                "memory": memory_share,
                "group share": group_share,
                "sigma": sigma,
                "efficiency": cost_of(WORKLOADS[name]).bandwidth_efficiency * ratio,
                "errors": misfits(name, runs),
            }
        )
    return rows


def table(rows: Sequence[Row]) -> str:
    """Return one line for each point, with the root mean square of its errors."""
    constants = ("limit", "memory", "group share", "sigma")
    columns = [*constants, "efficiency", *rows[0]["errors"], "RMS"]
    lines = [
        [
            *(str(row[name]) for name in constants),
            f"{row['efficiency']:.2f}",
            *(f"{error:+.0%}" for error in row["errors"].values()),
            f"{sqrt(fmean(error**2 for error in row['errors'].values())):.3f}",
        ]
        for row in rows
    ]
    return markdown(columns, lines, left=0)
