"""Lengths of chunks against each other in the simulator, beside veRL's policy, which has none.

Recorded iterations come several times, with their groups and each group's responses in another order, for who
comes first is luck and decides much.  A ratio is veRL's total time over a policy's, in one iteration.

  python benchmarks/chunk_lengths.py --only dapo-32b deepcoder-14b --json out/chunk_lengths.json
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import shlex
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import structlog
from seer_lab.lengths import DrawnLengths, GroupLengths
from seer_lab.policies import POLICIES, Policy
from seer_lab.simulate import simulate
from seer_lab.traces import read_lengths
from seer_lab.workloads import CLUSTERS, SYNTHETIC, WORKLOADS, Workload, crowded, scaled
from simulated import add_options, report

from seer_core.figures import ratios, spread

TRACES = Path(__file__).parents[2] / "shared" / "data" / "rollout_lengths.jsonl"
BASELINE = "verl"
PLUGINS = {
    "divided": ("divided_rollout",),
    "context": ("divided_rollout", "context_sched"),
    "length-posterior": ("divided_rollout", "length_posterior"),
}
CROWDED = ((2, 4.0), (4, 3.0))
"""Instances, and KV that the responses of an iteration fill in the end over what there is."""

SHORT = msgspec.structs.replace(
    SYNTHETIC, groups=96, mean_tokens=600, cap_tokens=8192, sigma=0.8, group_share=0.2
)
"""Short responses with a long tail that groups do not foretell, as in DAPO."""

LENGTHS = ("auto", "twentieth", "2048", "128", "64")
FINE = 256
"""Fixed chunks shorter than this are left out on the paper's workloads, which they cut into millions."""


def cases(scale: float, traces: Path) -> Iterable[tuple[str, Workload, bool]]:
    """Yield names and workloads, and whether responses are short enough for fine chunks."""
    for name in WORKLOADS:
        yield f"{name} x {scale:g}", scaled(WORKLOADS[name], scale), False
    drawn: dict[str, DrawnLengths | Sequence[Sequence[GroupLengths]]] = {
        "synthetic": SYNTHETIC,
        "short": SHORT,
    }
    if traces.exists():
        names = sorted({json.loads(line)["workload"] for line in traces.read_text().splitlines()})
        drawn |= {name: read_lengths(traces, [f"workload={name}"]) for name in names}
    else:
        print(f"no length traces: {traces} does not exist; name a file with --traces", file=sys.stderr)
    for name, lengths in drawn.items():
        for instances, pressure in CROWDED:
            cluster = CLUSTERS["qwen2-vl-72b"]
            workload = crowded(name, lengths, cluster, instances, pressure)
            yield f"{name}, {instances} instances, {pressure:g}", workload, True


def iteration(workload: Workload, seed: int) -> tuple[Workload, int]:
    """Return a workload and a seed of it: drawn anew, or recorded and in an order of the seed's own."""
    if isinstance(workload.lengths, DrawnLengths):
        return workload, seed
    order, number = divmod(seed, len(workload.lengths))
    draw = random.Random(seed)
    groups = list(workload.lengths[number])
    if order:
        groups = [
            msgspec.structs.replace(
                group, output_tokens=tuple(draw.sample(group.output_tokens, len(group.output_tokens)))
            )
            for group in draw.sample(groups, len(groups))
        ]
    return msgspec.structs.replace(workload, lengths=[groups]), 0


def chunk_override(workload: Workload, length: str) -> str:
    """Return the setting for a length: a number, ``auto``, or a ``twentieth`` of the longest context."""
    if length == "twentieth":
        engine = workload.tables["engine"]["sim"]
        block = engine["block_tokens"]
        length = str(max(1, engine["max_model_tokens"] // 20 // block) * block)
    return f"plugin.divided_rollout.chunk_tokens={length}"


def measure(workload: Workload, policy: Policy, seed: int, overrides: Sequence[str]) -> dict[str, Any]:
    """Simulate one iteration and return its figures."""
    run = simulate(*_ordered(workload, policy, seed), overrides)
    summary = run.summary
    return {
        "seed": seed,
        "total_s": round(summary.total_time_s, 2),
        "tail_s": round(summary.tail_time_s, 2),
        "preemptions": summary.preemptions,
        "migrations": summary.migrations,
        "wall_s": round(run.wall_s, 2),
    }


def _ordered(workload: Workload, policy: Policy, seed: int) -> tuple[Workload, Policy, int]:
    workload, seed = iteration(workload, seed)
    return workload, policy, seed


def line(rows: Sequence[Mapping[str, Any]], base: Sequence[Mapping[str, Any]]) -> str:
    """Return a policy's ratios over its iterations as one line of the table."""
    times = ratios([other["total_s"] for other in base], [row["total_s"] for row in rows])
    median, least, most = spread(times)
    first = rows[0]
    error = statistics.stdev(times) / len(times) ** 0.5 if len(times) > 1 else 0.0
    return (
        f"| {first['case']} | {first['policy']} | {first['length']} | {median:.3f}"
        f" | {statistics.geometric_mean(times):.3f} ± {error:.3f} | {least:.3f} to {most:.3f}"
        f" | {spread(row['migrations'] for row in rows).median:.0f} |"
    )


def main(argv: Sequence[str]) -> None:
    """Run the benchmark."""
    arguments = parse(argv)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    table: list[dict[str, Any]] = []
    print("| workload | policy | chunks | of veRL's: median | mean | least to most | migrations |")
    print("|---|---|---|---:|---:|---:|---:|")
    for name, workload, short in cases(arguments.scale, arguments.traces):
        if arguments.only and not any(name.startswith(wanted) for wanted in arguments.only):
            continue
        base = [measure(workload, POLICIES[BASELINE], seed, arguments.set) for seed in seeds]
        table += [{"case": name, "policy": BASELINE, "length": "", **row} for row in base]
        for policy in arguments.policies:
            for length in arguments.lengths:
                if length.isdigit() and int(length) < FINE and not short:
                    continue
                overrides = [chunk_override(workload, length), *arguments.set]
                stack = Policy(policy, PLUGINS[policy])
                rows = [
                    {
                        "case": name,
                        "policy": policy,
                        "length": length,
                        **measure(workload, stack, seed, overrides),
                    }
                    for seed in seeds
                ]
                print(line(rows, base), flush=True)
                table += rows
    command = shlex.join(["python", "benchmarks/chunk_lengths.py", *argv])
    report(command, table, arguments.json)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", metavar="WORKLOAD", help="those whose names begin so")
    parser.add_argument("--policies", nargs="+", choices=PLUGINS, default=list(PLUGINS), metavar="POLICY")
    parser.add_argument("--lengths", nargs="+", default=LENGTHS, metavar="LENGTH", help="lengths of chunks")
    parser.add_argument("--scale", type=float, default=0.125, help="share of the paper's workloads")
    parser.add_argument("--traces", type=Path, default=TRACES, metavar="FILE", help="recorded lengths")
    add_options(parser, 4, "iterations, or orders of them")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(sys.argv[1:])
