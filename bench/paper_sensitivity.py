"""How far does each constant of the simulator move its predictions of the paper's ablation?

One constant at a time is moved, most by 20 %; the others stay as they were fitted.  Throughputs are beside
veRL's policy, and `context's tail` is the time of the last tenth beside that.  A step that drafts takes 10 ms
longer in the fit.  ``--rounds`` are iterations, over which the figures are means.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from statistics import fmean

from seer_lab.lengths import DrawnLengths
from seer_lab.policies import POLICIES
from seer_lab.simulate import simulate
from seer_lab.workloads import WORKLOADS, Workload, scaled

from bench.frame import Row, markdown
from bench.paper_fit import cost_of, engines, with_lengths

ROOMS = ("seer_core", "plugins", "backends/sim", "lab")
ROUNDS = 1

FACTORS = (0.8, 1.2)
DRAFTING_STEPS_S = (0.0, 2e-3, 5e-3, 20e-3)
SHOWN = ("divided", "context", "seer", "verl+sd")


def moved(name: str) -> Iterator[tuple[str, Workload, list[str]]]:
    """Yield the workload as it is, then with one constant at a time moved."""
    workload = WORKLOADS[name]
    assert isinstance(workload.lengths, DrawnLengths)
    cost = cost_of(workload)
    yield "as fitted", workload, []
    for factor in FACTORS:
        sigma = round(workload.lengths.sigma * factor, 3)
        yield f"sigma {sigma}", with_lengths(workload, sigma=sigma), []
    yield "group share 0.7", with_lengths(workload, group_share=0.7), []
    for factor in FACTORS:
        reached = round(cost.bandwidth_efficiency * factor, 3)
        peaks = [f"engine.sim.cost.{peak}_efficiency={reached}" for peak in ("bandwidth", "compute")]
        yield f"efficiency {reached}", workload, peaks
    yield "of FLOPs alone 0.6", workload, ["engine.sim.cost.compute_efficiency=0.6"]
    overhead_s = cost.overhead_s * 2
    yield f"overhead {overhead_s * 1e3:.0f} ms", workload, [f"engine.sim.cost.overhead_s={overhead_s}"]
    for limit, memory_share in ((128, 0.9), (256, 0.8)):
        yield f"limit {limit}, memory {memory_share}", workload, engines(name, limit, memory_share)
    for parts in (20, 5):
        chunk = workload.tables["engine"]["sim"]["max_model_tokens"] // parts
        yield f"chunk {chunk}", workload, [f"plugin.divided_rollout.chunk_tokens={chunk}"]
    drafting = ("acceptance", f"drafts.{workload.tables['plugin']['vanilla_sd']['method']}")
    for seconds in DRAFTING_STEPS_S:
        steps = [f"engine.sim.{table}.step_s={seconds}" for table in drafting]
        yield f"drafting step {seconds * 1e3:.0f} ms", workload, steps


def options(parser: argparse.ArgumentParser) -> None:
    """Add the workload and its size."""
    parser.add_argument("workload", choices=list(WORKLOADS))
    parser.add_argument("--scale", type=float, help="so much of the groups and instances")
    parser.add_argument("--only", metavar="TEXT", help="constants that begin with this, beside the fit")


def run(options: argparse.Namespace) -> list[Row]:
    """Simulate veRL and the techniques with each constant moved."""
    rows = []
    for label, whole, changes in moved(options.workload):
        if options.only is not None and rows and not label.startswith(options.only):
            continue
        workload = whole if options.scale is None else scaled(whole, options.scale)
        runs = {
            policy: [
                simulate(workload, POLICIES[policy], seed, [*changes, *options.set])
                for seed in range(options.rounds)
            ]
            for policy in ("verl", *SHOWN)
        }
        base = runs["verl"]
        ratios = {
            policy: fmean(
                run.throughput_tokens_per_s / other.throughput_tokens_per_s
                for run, other in zip(runs[policy], base, strict=True)
            )
            for policy in SHOWN
        }
        tails = zip(runs["context"], base, strict=True)
        ratios["context's tail"] = fmean(
            run.summary.tail_time_s / other.summary.tail_time_s for run, other in tails
        )
        total_s = fmean(run.summary.total_time_s for run in base)
        tail_s = fmean(run.summary.tail_time_s for run in base)
        rows.append({"constant": label, "total_s": total_s, "tail_s": tail_s, "ratios": ratios})
    return rows


def table(rows: Sequence[Row]) -> str:
    """Return one line for each constant, with throughput and context's tail over veRL's."""
    columns = ["", "veRL total, s", "tail, s", *rows[0]["ratios"]]
    lines = [
        [
            row["constant"],
            *(f"{row[name]:,.0f}" for name in ("total_s", "tail_s")),
            *(f"{ratio:.2f}" for ratio in row["ratios"].values()),
        ]
        for row in rows
    ]
    return markdown(columns, lines)


def answer(rows: Sequence[Row]) -> str:
    """Return how far the constants that were moved move the gain of all techniques."""
    found = {row["constant"]: row["ratios"]["seer"] for row in rows}
    fitted = found.pop("as fitted")
    moved = ", ".join(f"{ratio:.2f}x at {constant}" for constant, ratio in found.items())
    return f"All techniques make {fitted:.2f}x veRL's throughput as fitted, and {moved}."
