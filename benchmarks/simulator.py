"""What simulating costs: CPU time and memory of the paper's iterations, and of larger ones.

Each run is a process of its own: one iteration of a workload under a policy, as `seer sim` runs it, from
drawing the lengths to the summary.  Rows of scale are Qwen2-VL-72B's responses on more instances, for the
same number of requests on each.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import platform
import pstats
import resource
import shlex
import subprocess
import sys
from pathlib import Path
from time import process_time
from typing import Any

import msgspec
import structlog
from seer_lab.policies import POLICIES
from seer_lab.simulate import Simulation, simulate
from seer_lab.workloads import WORKLOADS, Workload

from seer_core.figures import spread

REQUESTS_PER_INSTANCE = 1000
KV_POOL = ["seer.kv_pool=sim_pool", "kv_pool.sim_pool.dram_bytes=1_000_000_000_000_000"]


def workload_of(name: str) -> Workload:
    """Return one of the paper's, or ``INSTANCES`` times 1000 of Qwen2-VL-72B's requests."""
    if name in WORKLOADS:
        return WORKLOADS[name]
    qwen, instances = WORKLOADS["qwen2-vl-72b"], int(name)
    groups = instances * REQUESTS_PER_INSTANCE // qwen.lengths.group_size
    tables = {**qwen.tables, "engine": {"sim": {**qwen.tables["engine"]["sim"], "instances": instances}}}
    return Workload(name, msgspec.structs.replace(qwen.lengths, groups=groups), tables)


def run(name: str, policy: str) -> Simulation:
    """Simulate one iteration."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    return simulate(workload_of(name), POLICIES[policy], 0, KV_POOL)


def one(name: str, policy: str) -> dict[str, Any]:
    """Return what one simulation took, in this process."""
    workload = workload_of(name)
    began_s = process_time()
    summary = run(name, policy).summary
    cpu_s = process_time() - began_s
    return {
        "requests": summary.requests,
        "instances": workload.tables["engine"]["sim"]["instances"],
        "chunks": summary.chunks,
        "tokens": summary.tokens,
        "cpu_s": cpu_s,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def measure(name: str, policy: str, repeat: int) -> dict[str, Any]:
    """Return the medians of ``repeat`` processes, and the spread of their CPU times."""
    command = [sys.executable, __file__, "--one", name, policy]
    runs = [
        json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        for _ in range(repeat)
    ]
    cpu_s = spread(each["cpu_s"] for each in runs)
    return {
        **runs[0],
        "workload": name,
        "policy": policy,
        "cpu_s": cpu_s.median,
        "cpu_s_spread": [cpu_s.least, cpu_s.most],
        "us_per_chunk": cpu_s.median / runs[0]["chunks"] * 1e6,
        "peak_mb": spread(each["peak_mb"] for each in runs).median,
    }


HEADER = """\
| workload | policy | requests | instances | chunks | tokens, millions | CPU, s | us per chunk | peak MB |
|---|---|---:|---:|---:|---:|---:|---:|---:|"""


def show(row: dict[str, Any]) -> str:
    """Return a row of the table."""
    low, high = row["cpu_s_spread"]
    return (
        f"| {row['workload']} | {row['policy']} | {row['requests']:,} | {row['instances']:,} |"
        f" {row['chunks']:,} | {row['tokens'] / 1e6:,.1f} | {row['cpu_s']:.1f} [{low:.1f}, {high:.1f}] |"
        f" {row['us_per_chunk']:.0f} | {row['peak_mb']:,.0f} |"
    )


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example:\n  python benchmarks/simulator.py --scale 1000 --policies context --repeat 1",
    )
    parser.add_argument("--workloads", nargs="*", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--policies", nargs="+", default=["verl", "context", "seer"], choices=list(POLICIES))
    parser.add_argument(
        "--scale", type=int, nargs="*", default=[10, 100], metavar="INSTANCES", help="for policy context"
    )
    parser.add_argument("--repeat", type=int, default=3, help="the median of so many is reported")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to a file, too")
    parser.add_argument("--profile", nargs=2, metavar=("WORKLOAD", "POLICY"), help="say where time goes")
    parser.add_argument("--one", nargs=2, metavar=("WORKLOAD", "POLICY"), help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: list[str]) -> None:
    """Run the benchmark."""
    arguments = parse(argv)
    if arguments.one:
        print(json.dumps(one(*arguments.one)))
        return
    if arguments.profile:
        profiler = cProfile.Profile()
        profiler.runcall(run, *arguments.profile)
        pstats.Stats(profiler).sort_stats("tottime").print_stats(30)
        return
    command = shlex.join(["python", "benchmarks/simulator.py", *argv])
    cases = [(name, policy) for name in arguments.workloads for policy in arguments.policies]
    cases += [(str(instances), "context") for instances in arguments.scale]
    rows = []
    print(HEADER)
    for name, policy in cases:
        rows.append(measure(name, policy, arguments.repeat))
        print(show(rows[-1]), flush=True)
    machine = f"{platform.python_implementation()} {platform.python_version()}, {platform.machine()}"
    print(f"\nCPU time of one process, medians of {arguments.repeat} [least, most]. {machine}")
    print(f"reproduce: {command}")
    if arguments.json:
        report = {"command": command, "machine": machine, "rows": rows}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
