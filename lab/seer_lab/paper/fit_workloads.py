"""Fit the paper's workloads to its veRL baseline, and show how much the predictions move with each constant.

``fit`` prints what veRL does at each point of a grid, beside what the paper says of it: total and tail time,
and for Qwen2-VL-72B preemptions, idle time and late starts as well, which determine the running limit and the
memory for KV.  Nothing else of the paper is looked at.  The efficiency (what is reached of bandwidth and FLOP
peaks) scales all times alike: the grid leaves it alone and prints the one that the total asks for.
``sensitivity`` moves one constant at a time and prints the ratios of the ablation.

    python -m seer_lab.paper.fit_workloads fit qwen2-vl-72b
    python -m seer_lab.paper.fit_workloads sensitivity qwen2-vl-72b
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator, Sequence
from itertools import product
from math import sqrt
from statistics import fmean

import msgspec
import structlog
from seer_sim.cost import PRESETS

from seer_lab.lengths import DrawnLengths
from seer_lab.paper.numbers import TIMES, VERL
from seer_lab.policies import POLICIES
from seer_lab.simulate import SimulatedIteration, simulate
from seer_lab.workloads import CLUSTERS, WORKLOADS, Workload, scaled

SIGMAS = {
    "moonlight": (0.6, 0.7, 0.8, 1.0),
    "qwen2-vl-72b": (0.8, 0.9, 1.0, 1.2),
    "kimi-k2": (0.5, 0.6, 0.7, 0.8),
}
GROUP_SHARES = (0.7, 0.8, 0.9)
ENGINES = ((160, 0.75), (192, 0.8), (224, 0.85), (256, 0.8), (256, 0.9), (1024, 0.9))
"""Running limit of a rank, and the share of the memory that is for weights and KV."""

FACTORS = (0.8, 1.2)
POLICIES_SHOWN = ("divided", "context", "seer", "verl+sd")


def with_lengths(workload: Workload, **changes: float) -> Workload:
    """Return the workload with other constants of its lengths."""
    assert isinstance(workload.lengths, DrawnLengths)
    return msgspec.structs.replace(workload, lengths=msgspec.structs.replace(workload.lengths, **changes))


def efficiency(value: float) -> list[str]:
    """Return what sets the share of both peaks that is reached."""
    return [f"engine.sim.cost.{peak}_efficiency={value}" for peak in ("bandwidth", "compute")]


def engines(name: str, limit: int, memory_share: float) -> list[str]:
    """Return what gives each rank of a workload another running limit, and each GPU another memory share."""
    cluster = CLUSTERS[name]
    ranks = cluster.max_running // CLUSTERS["moonlight"].max_running
    tokens = msgspec.structs.replace(cluster, memory_share=memory_share).kv_capacity_tokens
    return [f"engine.sim.max_running={limit * ranks}", f"engine.sim.kv_capacity_tokens={tokens}"]


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


def fit(name: str, seeds: int) -> None:
    """Print the grid: limit and memory, group share and sigma, the efficiency they need, and the misfits."""
    reached = PRESETS[preset_of(WORKLOADS[name])].bandwidth_efficiency
    print(f"{name}: veRL's errors against the paper; means of {seeds} iterations")
    for number, point in enumerate(product(ENGINES, GROUP_SHARES, SIGMAS[name])):
        (limit, memory_share), group_share, sigma = point
        workload = with_lengths(WORKLOADS[name], sigma=sigma, group_share=group_share)
        overrides = engines(name, limit, memory_share)
        runs = [simulate(workload, POLICIES["verl"], seed, overrides) for seed in range(seeds)]
        needed = reached * fmean(run.summary.total_time_s for run in runs) / TIMES[name]["verl"][0]
        errors = misfits(name, runs)
        if not number:
            columns = ["limit", "memory", "group share", "sigma", "efficiency", *errors, "RMS"]
            print(f"| {' | '.join(columns)} |\n|{'---:|' * len(columns)}")
        cells = [f"{error:+.0%}" for error in errors.values()]
        rms = sqrt(fmean(error**2 for error in errors.values()))
        print(
            f"| {limit} | {memory_share} | {group_share} | {sigma} | {needed:.2f} | {' | '.join(cells)}"
            f" | {rms:.3f} |",
            flush=True,
        )


def preset_of(workload: Workload) -> str:
    """Return the name of the workload's cost constants."""
    return str(workload.tables["engine"]["sim"]["preset"])


def moved(name: str) -> Iterator[tuple[str, Workload, list[str]]]:
    """Yield the workload as it is, then with one constant at a time moved, most by 20 %."""
    workload = WORKLOADS[name]
    assert isinstance(workload.lengths, DrawnLengths)
    cost = PRESETS[preset_of(workload)]
    plugins = workload.tables["plugin"]
    yield "as fitted", workload, []
    for factor in FACTORS:
        sigma = round(workload.lengths.sigma * factor, 3)
        yield f"sigma {sigma}", with_lengths(workload, sigma=sigma), []
    yield "group share 0.7", with_lengths(workload, group_share=0.7), []
    for factor in FACTORS:
        reached = round(cost.bandwidth_efficiency * factor, 3)
        yield f"efficiency {reached}", workload, efficiency(reached)
    yield "of FLOPs alone 0.6", workload, ["engine.sim.cost.compute_efficiency=0.6"]
    yield (
        f"overhead {cost.overhead_s * 2e3:.0f} ms",
        workload,
        [f"engine.sim.cost.overhead_s={cost.overhead_s * 2}"],
    )
    for limit, memory_share in ((128, 0.9), (256, 0.8)):
        yield f"limit {limit}, memory {memory_share}", workload, engines(name, limit, memory_share)
    for parts in (20, 5):
        chunk = workload.tables["engine"]["sim"]["max_model_tokens"] // parts
        yield f"chunk {chunk}", workload, [f"plugin.divided_rollout.chunk_tokens={chunk}"]
    for seconds in (0.0, 20e-3):
        tables = ("acceptance", f"drafts.{plugins['vanilla_sd']['method']}")
        settings = [f"engine.sim.{table}.step_s={seconds}" for table in tables]
        yield f"drafting step {seconds * 1e3:.0f} ms", workload, settings


def sensitivity(name: str, seeds: int, scale: float | None) -> None:
    """Print veRL's times, the ratios of the ablation and a tail time, one constant moved at a time."""
    print(f"{name}: means of {seeds} iterations; throughput over veRL's, and context's tail over veRL's")
    print(f"| | veRL total, s | tail, s | {' | '.join(POLICIES_SHOWN)} | context's tail |")
    print(f"|---|---:|---:|{'---:|' * len(POLICIES_SHOWN)}---:|")
    for label, whole, overrides in moved(name):
        workload = whole if scale is None else scaled(whole, scale)
        runs = {
            policy: [simulate(workload, POLICIES[policy], seed, overrides) for seed in range(seeds)]
            for policy in ("verl", *POLICIES_SHOWN)
        }
        base = runs["verl"]
        ratios = [
            fmean(
                run.throughput_tokens_per_s / other.throughput_tokens_per_s
                for run, other in zip(runs[policy], base, strict=True)
            )
            for policy in POLICIES_SHOWN
        ]
        tails = zip(runs["context"], base, strict=True)
        ratios.append(fmean(run.summary.tail_time_s / other.summary.tail_time_s for run, other in tails))
        total_s = fmean(run.summary.total_time_s for run in base)
        tail_s = fmean(run.summary.tail_time_s for run in base)
        cells = " | ".join(f"{ratio:.2f}" for ratio in ratios)
        print(f"| {label} | {total_s:,.0f} | {tail_s:,.0f} | {cells} |", flush=True)


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["fit", "sensitivity"])
    parser.add_argument("workload", choices=list(TIMES))
    parser.add_argument("--seeds", type=int, help="iterations (fit: 5, sensitivity: 1)")
    parser.add_argument("--scale", type=float, help="so much of the groups and instances (sensitivity)")
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    if arguments.what == "fit":
        fit(arguments.workload, arguments.seeds or 5)
    else:
        sensitivity(arguments.workload, arguments.seeds or 1, arguments.scale)


if __name__ == "__main__":
    main()
