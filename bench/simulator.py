"""What does simulating cost: CPU time and memory of the paper's iterations, and of larger ones?

Each run is a process of its own: one iteration of a workload under a policy, as `seer sim` runs it, from
drawing the lengths to the summary.  Rows of scale are Qwen2-VL-72B's responses on more instances, with 1,000
requests on each.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import resource
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from time import process_time
from typing import Any

import msgspec
import structlog
from seer_lab.policies import POLICIES
from seer_lab.simulate import simulate
from seer_lab.workloads import WORKLOADS, Workload

from bench.frame import Row, cell, markdown, spread_of, turned

ROOMS = ("seer_core", "plugins", "backends/sim", "lab")
ROUNDS = 3

REQUESTS_PER_INSTANCE = 1000
KV_POOL = ["seer.kv_pool=sim_pool", "kv_pool.sim_pool.dram_bytes=1_000_000_000_000_000"]


def workload_of(name: str) -> Workload:
    """Return one of the paper's, or ``INSTANCES`` times 1000 of Qwen2-VL-72B's requests."""
    if name in WORKLOADS:
        return WORKLOADS[name]
    qwen, instances = WORKLOADS["qwen2-vl-72b"], int(name)
    lengths: Any = qwen.lengths
    groups = instances * REQUESTS_PER_INSTANCE // lengths.group_size
    tables = {**qwen.tables, "engine": {"sim": {**qwen.tables["engine"]["sim"], "instances": instances}}}
    return Workload(name, msgspec.structs.replace(lengths, groups=groups), tables)


def simulated(name: str, policy: str) -> Row:
    """Simulate one iteration in this process and return what that took."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    workload = workload_of(name)
    began_s = process_time()
    summary = simulate(workload, POLICIES[policy], 0, KV_POOL).summary
    return {
        "cpu_s": process_time() - began_s,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "requests": summary.requests,
        "instances": workload.tables["engine"]["sim"]["instances"],
        "chunks": summary.chunks,
        "tokens": summary.tokens,
    }


def options(parser: argparse.ArgumentParser) -> None:
    """Add the case's own options."""
    parser.add_argument("--workloads", nargs="*", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--policies", nargs="+", default=["verl", "context", "seer"], choices=list(POLICIES))
    parser.add_argument(
        "--scale", type=int, nargs="*", default=[10, 100], metavar="INSTANCES", help="for policy context"
    )


def run(options: argparse.Namespace) -> list[Row]:
    """Simulate every combination in every round, each in a process of its own."""
    arms = [(name, policy) for name in options.workloads for policy in options.policies]
    arms += [(str(instances), "context") for instances in options.scale]
    found: dict[tuple[str, str], list[Row]] = {arm: [] for arm in arms}
    for number, arm in turned(arms, options.rounds):
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            found[arm].append(process.submit(simulated, *arm).result())
        print(f"round {number + 1}, {' '.join(arm)}: {found[arm][-1]['cpu_s']:.1f} s of CPU", file=sys.stderr)
    return [
        {
            **rows[0],
            "workload": name,
            "policy": policy,
            "cpu_s": spread_of(row["cpu_s"] for row in rows),
            "peak_mb": spread_of(row["peak_mb"] for row in rows),
        }
        for (name, policy), rows in found.items()
    ]


def table(rows: Sequence[Row]) -> str:
    """Return one line for each workload and policy."""
    columns = [
        "workload",
        "policy",
        "requests",
        "instances",
        "chunks",
        "tokens",
        "CPU, s",
        "us per chunk",
        "MB",
    ]
    lines = [
        [
            row["workload"],
            row["policy"],
            *(f"{row[name]:,}" for name in ("requests", "instances", "chunks", "tokens")),
            cell(row["cpu_s"]),
            f"{row['cpu_s']['median'] / row['chunks'] * 1e6:.0f}",
            f"{row['peak_mb']['median']:,.0f}",
        ]
        for row in rows
    ]
    return markdown(columns, lines, left=2)
