"""Fit the paper's workloads to its veRL baseline, and show how much the predictions move with each constant.

For each pair of sigma and group share, the efficiency (what is reached of bandwidth and FLOP peaks) is set so
that veRL's total time comes out; what is left is the error of its tail time.  Nothing else of the paper is
looked at.  ``sensitivity`` moves one constant at a time and prints the ablation's ratios.

    python benchmarks/fit_workloads.py fit qwen2-vl-72b
    python benchmarks/fit_workloads.py sensitivity qwen2-vl-72b
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator, Sequence
from statistics import fmean

import msgspec
import structlog
from seer_lab.lengths import DrawnLengths
from seer_lab.paper.numbers import TIMES
from seer_lab.policies import POLICIES
from seer_lab.simulate import Simulation, simulate
from seer_lab.workloads import WORKLOADS, Workload, scaled
from seer_sim.cost import PRESETS

SIGMAS = (0.6, 0.7, 0.8, 0.9, 1.0)
GROUP_SHARES = (0.7, 0.9)
SEEDS = range(5)
"""The paper averages over five iterations."""

TOTAL_TOLERANCE = 0.01
MOST_TRIES = 5

FACTORS = (0.8, 1.2)
POLICIES_SHOWN = ("divided", "context", "seer", "verl+sd")


def with_lengths(workload: Workload, **changes: float) -> Workload:
    """Return the workload with other constants of its lengths."""
    assert isinstance(workload.lengths, DrawnLengths)
    return msgspec.structs.replace(workload, lengths=msgspec.structs.replace(workload.lengths, **changes))


def efficiency(value: float) -> list[str]:
    """Return what sets the share of both peaks that is reached."""
    return [f"engine.sim.cost.{peak}_efficiency={value}" for peak in ("bandwidth", "compute")]


def verl(workload: Workload, overrides: Sequence[str]) -> list[Simulation]:
    """Roll out under veRL, once per seed."""
    return [simulate(workload, POLICIES["verl"], seed, overrides) for seed in SEEDS]


def fit(name: str) -> None:
    """Print the grid: what each pair of sigma and group share makes of veRL, at the efficiency it needs."""
    total_s, tail_s = TIMES[name]["verl"]
    print(f"{name}: veRL {total_s:,.0f} s, tail {tail_s:,.0f} s (paper); means of {len(SEEDS)} iterations")
    print("| sigma | group share | efficiency | total | tail | preemptions | idle |")
    print("|---:|---:|---:|---:|---:|---:|---:|")
    for share in GROUP_SHARES:
        reached = PRESETS[preset_of(WORKLOADS[name])].bandwidth_efficiency
        for sigma in SIGMAS:
            workload = with_lengths(WORKLOADS[name], sigma=sigma, group_share=share)
            for _ in range(MOST_TRIES):
                runs = verl(workload, efficiency(reached))
                total = fmean(run.summary.total_time_s for run in runs) / total_s
                if abs(total - 1) < TOTAL_TOLERANCE:
                    break
                reached = min(1.0, reached * total)
            tail = fmean(run.summary.tail_time_s for run in runs) / tail_s
            preemptions = fmean(run.summary.preemptions for run in runs)
            idle = fmean(run.idle_share for run in runs)
            print(
                f"| {sigma} | {share} | {reached:.3f} | {total - 1:+.1%} | {tail - 1:+.1%}"
                f" | {preemptions:,.0f} | {idle:.0%} |",
                flush=True,
            )


def preset_of(workload: Workload) -> str:
    """Return the name of the workload's cost constants."""
    return str(workload.tables["engine"]["sim"]["preset"])


def moved(name: str) -> Iterator[tuple[str, Workload, list[str]]]:
    """Yield the workload as it is, then with one constant at a time moved by 20 % (shares: to 0.7)."""
    workload = WORKLOADS[name]
    assert isinstance(workload.lengths, DrawnLengths)
    cost = PRESETS[preset_of(workload)]
    engine = workload.tables["engine"]["sim"]
    method = workload.tables["plugin"]["vanilla_sd"]["method"]
    yield "as fitted", workload, []
    for factor in FACTORS:
        sigma = round(workload.lengths.sigma * factor, 3)
        yield f"sigma {sigma}", with_lengths(workload, sigma=sigma), []
    yield "group share 0.7", with_lengths(workload, group_share=0.7), []
    for factor in FACTORS:
        reached = round(cost.bandwidth_efficiency * factor, 3)
        yield f"efficiency {reached}", workload, efficiency(reached)
    for factor in FACTORS:
        overhead_s = cost.overhead_s * factor
        yield f"overhead {overhead_s * 1e3:.0f} ms", workload, [f"engine.sim.cost.overhead_s={overhead_s}"]
    for limit in (engine["max_running"] // 2, engine["max_running"] * 2):
        yield f"running limit {limit}", workload, [f"engine.sim.max_running={limit}"]
    for seconds in (0.0, 5e-3, 20e-3):
        settings = [f"engine.sim.{table}.step_s={seconds}" for table in ("acceptance", f"drafts.{method}")]
        yield f"drafting step {seconds * 1e3:.0f} ms", workload, settings


def sensitivity(name: str, seeds: int, scale: float | None) -> None:
    """Print veRL's times and the ratios of the ablation, one constant moved at a time."""
    print(f"{name}: means of {seeds} iterations; throughput over veRL's")
    print(f"| | veRL total, s | tail, s | {' | '.join(POLICIES_SHOWN)} |")
    print(f"|---|---:|---:|{'---:|' * len(POLICIES_SHOWN)}")
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
    parser.add_argument("--seeds", type=int, default=1, help="of the sensitivity table")
    parser.add_argument("--scale", type=float, help="so much of the groups and instances (sensitivity)")
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    if arguments.what == "fit":
        fit(arguments.workload)
    else:
        sensitivity(arguments.workload, arguments.seeds, arguments.scale)


if __name__ == "__main__":
    main()
