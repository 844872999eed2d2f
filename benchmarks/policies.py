"""Scheduling policies against each other in the simulator, on the paper's workloads and on length traces.

Every policy sees the same iterations; a ratio is taken per seed, then averaged geometrically.  "of the bound"
compares the total time with one that nothing can beat (see ``least_s``).
"""

from __future__ import annotations

import argparse
import json
import logging
import shlex
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import structlog
from seer_lab.policies import POLICIES, Policy
from seer_lab.simulate import simulate
from seer_lab.traces import read_lengths
from seer_lab.workloads import CLUSTERS, WORKLOADS, Workload, crowded, scaled
from seer_sim.cost import PRESETS
from simulated import add_options, report

from seer_core.figures import spread

LENGTHS = Path(__file__).parents[2] / "shared" / "data" / "rollout_lengths.jsonl"
TRACE_INSTANCES = 2
PRESSURE = 4.0
"""KV that all responses of an iteration fill in the end, over what there is: that of Qwen2-VL-72B's."""

BLOCK_TOKENS = 16

STACK = ("divided_rollout", "length_posterior")
BASELINE, REFERENCE, OURS, ORACLE = "verl", "context", "length-posterior", "oracle"


@attrs.frozen
class Contender:
    """A policy and what is set for it; ``{eighth}`` stands for an eighth of the longest allowed response."""

    name: str
    policy: Policy
    overrides: tuple[str, ...] = ()


def ours(name: str, *settings: str, plugins: Sequence[str] = STACK) -> Contender:
    """Return a contender with the plug-in and some of its settings."""
    overrides = tuple(f"plugin.length_posterior.{setting}" for setting in settings)
    return Contender(name, Policy(name, tuple(plugins)), overrides)


MAIN = (
    Contender(BASELINE, POLICIES[BASELINE]),
    Contender("divided", POLICIES["divided"]),
    Contender(REFERENCE, POLICIES[REFERENCE]),
    ours(OURS),
    Contender(ORACLE, POLICIES[ORACLE]),
)
ABLATION = (
    Contender(REFERENCE, POLICIES[REFERENCE]),
    ours(OURS),
    ours("turns alone", "surprise=1e-12"),
    ours("surprise 0.2", "surprise=0.2"),
    ours("surprise 0.01", "surprise=0.01"),
    ours("long turns", "turn_tokens={eighth}"),
    Contender(ORACLE, POLICIES[ORACLE]),
)
NO_POOL = (
    Contender(REFERENCE, POLICIES[REFERENCE], ("seer.kv_pool=none",)),
    Contender(OURS, ours(OURS).policy, ("seer.kv_pool=none",)),
    Contender(
        "long turns", ours(OURS).policy, ("seer.kv_pool=none", "plugin.length_posterior.turn_tokens={eighth}")
    ),
    Contender(ORACLE, POLICIES[ORACLE], ("seer.kv_pool=none",)),
)
DRAFTS = (
    Contender(REFERENCE, POLICIES[REFERENCE]),
    Contender("seer", POLICIES["seer"]),
    ours(OURS + "+drafts", plugins=(*STACK, "grouped_spec")),
)
CONTESTS: Mapping[str, Sequence[Contender]] = {
    "main": MAIN,
    "ablation": ABLATION,
    "no-pool": NO_POOL,
    "drafts": DRAFTS,
}


@attrs.frozen
class Case:
    """A workload, under a name that says what is special about it."""

    name: str
    workload: Workload
    overrides: tuple[str, ...] = ()


def cases(scale: float, traces: Path) -> Iterable[Case]:
    """Yield the paper's workloads, two of them again with less KV, and the traces' workloads."""
    for name in WORKLOADS:
        yield Case(name, scaled(WORKLOADS[name], scale) if scale < 1 else WORKLOADS[name])
    for name in ("moonlight", "kimi-k2"):
        workload = scaled(WORKLOADS[name], scale) if scale < 1 else WORKLOADS[name]
        tokens = CLUSTERS[name].kv_capacity_tokens * 45 // 100 // BLOCK_TOKENS * BLOCK_TOKENS
        yield Case(f"{name}, 0.45 KV", workload, (f"engine.sim.kv_capacity_tokens={tokens}",))
    if not traces.exists():
        progress(f"no length traces: {traces} does not exist; name a file with --traces")
        return
    cluster = CLUSTERS["qwen2-vl-72b"]
    for name in sorted({json.loads(line)["workload"] for line in traces.read_text().splitlines()}):
        lengths = read_lengths(traces, [f"workload={name}"])
        yield Case(name, crowded(name, lengths, cluster, TRACE_INSTANCES, PRESSURE))


def longest_allowed(workload: Workload) -> int:
    """Return the largest ``max_tokens`` of an iteration."""
    return max(group.max_tokens for group in workload.groups(0))


def least_s(workload: Workload, overrides: Sequence[str], seed: int) -> float:
    """Return seconds below which no schedule without drafts can end.

    A response of L tokens after a prompt of P keeps P + k tokens of KV in its k-th decoding step.  These add
    up to an area; a step holds at most the instance's KV, costs at least a pass of one position, and reads
    what it holds.  So all steps cost at least ``area / capacity`` passes and one reading of the area, shared
    by the instances; nor can the longest response take less than it would alone.
    """
    engine = workload.config((), overrides).engine["sim"]
    cost = PRESETS[engine["preset"]]
    pass_s, read_s = cost.pass_s(1), cost.attention_s(1)
    area, alone_s = 0.0, 0.0
    for group in workload.groups(seed):
        for tokens in group.output_tokens:
            steps = tokens - 1  # the first token comes with the prompt
            reads = steps * group.prompt_tokens + steps * (steps + 1) / 2
            area += reads
            alone_s = max(alone_s, steps * pass_s + reads * read_s)
    together_s = area * (pass_s / engine["kv_capacity_tokens"] + read_s) / engine["instances"]
    return max(together_s, alone_s)


def measure(case: Case, contender: Contender, seed: int, more: Sequence[str] = ()) -> dict[str, Any]:
    """Simulate one iteration and return its figures."""
    eighth = longest_allowed(case.workload) // 8
    engines = [*case.overrides, *more]
    mine = [text.format(eighth=eighth) for text in contender.overrides]
    run = simulate(case.workload, contender.policy, seed, [*engines, *mine])
    summary = run.summary
    return {
        "case": case.name,
        "policy": contender.name,
        "seed": seed,
        "total_s": round(summary.total_time_s, 1),
        "tail_s": round(summary.tail_time_s, 1),
        "throughput": summary.throughput_tokens_per_s,
        "least_s": round(least_s(case.workload, engines, seed), 1),
        "preemptions": summary.preemptions,
        "migrations": summary.migrations,
        "recomputed_tokens": summary.recomputed_tokens,
        "pool_tokens": summary.pool_tokens,
        "kv_usage": round(run.kv_usage, 3),
    }


def ratios(rows: Sequence[Mapping[str, Any]], to: Sequence[Mapping[str, Any]], figure: str) -> list[float]:
    """Return one ratio per seed."""
    others = {row["seed"]: row for row in to}
    return [row[figure] / others[row["seed"]][figure] for row in rows if others[row["seed"]][figure]]


def geometric(values: Iterable[float]) -> float:
    """Return the geometric mean."""
    return statistics.geometric_mean(values)


def row_text(
    rows: Sequence[Mapping[str, Any]], by: Mapping[str, Sequence[Mapping[str, Any]]], shown: str
) -> str:
    """Return one line of the table: a policy on a workload, over its seeds."""
    against = ratios(rows, by[REFERENCE], "throughput")
    oracle = f"{geometric(ratios(rows, by[ORACLE], 'throughput')):.3f}" if ORACLE in by else ""
    tails = ratios(rows, by[BASELINE], "tail_s") if BASELINE in by else []
    tail = f" ({spread(tails).median:.2f}x)" if tails else ""
    bound = geometric(row["least_s"] / row["total_s"] for row in rows)
    return (
        f"| {shown} | {rows[0]['policy']} | {spread(row['total_s'] for row in rows).median:.0f}"
        f" | {spread(row['tail_s'] for row in rows).median:.0f}{tail}"
        f" | {geometric(against):.3f} [{min(against):.3f}, {max(against):.3f}] | {oracle} | {bound:.2f} |"
    )


HEADER = """\
| workload | policy | total, s | tail, s (to veRL) | throughput to context_sched [least, most] | to oracle | of the bound |
|---|---|---:|---:|---:|---:|---:|"""  # noqa: E501


def contest(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure everything that was asked for and print the table as it comes."""
    contenders = CONTESTS[arguments.contest]
    table: list[dict[str, Any]] = []
    print(HEADER)
    for case in cases(arguments.scale, arguments.traces):
        if arguments.only and case.name not in arguments.only:
            continue
        by: dict[str, list[dict[str, Any]]] = {}
        for contender in contenders:
            for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
                progress(f"{case.name}: {contender.name}, seed {seed}")
                by.setdefault(contender.name, []).append(measure(case, contender, seed, arguments.set))
        for name, rows in by.items():
            print(row_text(rows, by, case.name if name == contenders[0].name else ""), flush=True)
            table += rows
    return table


def means(table: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    """Yield, per policy, the geometric mean over workloads of its throughput to the reference's."""
    names = list(dict.fromkeys(row["policy"] for row in table))
    for name in names:
        per_case = []
        for case in dict.fromkeys(row["case"] for row in table):
            mine = [row for row in table if row["case"] == case and row["policy"] == name]
            reference = [row for row in table if row["case"] == case and row["policy"] == REFERENCE]
            per_case.append(geometric(ratios(mine, reference, "throughput")))
        yield f"{name}: {geometric(per_case):.3f} over {len(per_case)} workloads"


def progress(text: str) -> None:
    """Tell the user what happens."""
    print(text, file=sys.stderr, flush=True)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example:\n  python benchmarks/policies.py --only qwen2-vl-72b --seeds 3 --json rows.json",
    )
    parser.add_argument("contest", nargs="?", choices=CONTESTS, default="main", help="which policies")
    parser.add_argument("--only", nargs="+", metavar="WORKLOAD", help="these workloads only")
    parser.add_argument("--scale", type=float, default=0.25, help="share of the paper's groups and instances")
    parser.add_argument(
        "--traces", type=Path, default=LENGTHS, metavar="FILE", help="recorded lengths, as of `seer sim`"
    )
    add_options(parser, 3, "iterations per workload")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> None:
    """Run the benchmark."""
    arguments = parse(argv)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    command = shlex.join(["python", "benchmarks/policies.py", *argv])
    table = contest(arguments)
    print("\nThroughput to context_sched, geometric means:")
    print("\n".join(means(table)))
    report(command, table, arguments.json)


if __name__ == "__main__":
    main(sys.argv[1:])
