"""How policies fare when prompts are long: simulated rollouts over shares of the context and group sizes.

A prompt takes a share of the longest context; responses, at most as long as the rest, have the spread of
Qwen2-VL-72B's.  Engines are that cluster's, with KV that the iteration's contexts would fill ``--pressure``
times, each prompt counted once per group, as vLLM keeps it.  Every policy sees the same iterations, and
ratios of throughput to veRL's policy are taken iteration by iteration.
"""

from __future__ import annotations

import argparse
import logging
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import structlog
from seer_lab.lengths import DrawnLengths
from seer_lab.policies import POLICIES
from seer_lab.simulate import simulate
from seer_lab.workloads import CLUSTERS, WORKLOADS, Workload, on
from simulated import add_options, report

from seer_core.figures import Spread, ratios, spread

BASELINE, DIVIDED, CONTEXT = "verl", "divided", "context"
SHARES = (0.01, 0.1, 0.25, 0.5)
SIZES = (8, 16)
CLUSTER = "qwen2-vl-72b"
BLOCK_TOKENS = 16


def workload(share: float, size: int, arguments: argparse.Namespace) -> Workload:
    """Return groups of ``size`` whose prompts take ``share`` of the context, and engines for them."""
    like = WORKLOADS[CLUSTER].lengths
    assert isinstance(like, DrawnLengths)
    prompt = round(share * arguments.context)
    cap = arguments.context - prompt
    lengths = msgspec.structs.replace(
        like,
        groups=arguments.requests // size,
        group_size=size,
        mean_tokens=cap * like.mean_tokens / like.cap_tokens,
        cap_tokens=cap,
        prompt_tokens=prompt,
    )
    needed = sum(prompt + sum(group.output_tokens) for group in lengths.draw(0))
    capacity = max(needed / arguments.pressure / arguments.instances, arguments.context)
    tables = on(CLUSTERS[CLUSTER], arguments.context)
    tables["engine"]["sim"] |= {
        "instances": arguments.instances,
        "kv_capacity_tokens": -(-int(capacity) // BLOCK_TOKENS) * BLOCK_TOKENS,
    }
    return Workload(f"{share:.0%} prompts, groups of {size}", lengths, tables)


def measure(case: Workload, policy: str, seed: int, overrides: Sequence[str]) -> dict[str, Any]:
    """Simulate one iteration and return its figures."""
    run = simulate(case, POLICIES[policy], seed, overrides)
    summary = run.summary
    return {
        "case": case.name,
        "policy": policy,
        "seed": seed,
        "total_s": round(summary.total_time_s, 2),
        "tail_s": round(summary.tail_time_s, 2),
        "throughput": summary.throughput_tokens_per_s,
        "preemptions": summary.preemptions,
        "migrations": summary.migrations,
        "recomputed_tokens": summary.recomputed_tokens,
        "kv_usage": round(run.kv_usage, 3),
    }


def row_text(rows: Sequence[Mapping[str, Any]], baseline: Sequence[Mapping[str, Any]], shown: str) -> str:
    """Return one line of the table: a policy in a cell, over its seeds."""

    def median(figure: str) -> float:
        return spread(row[figure] for row in rows).median

    def to_baseline(figure: str) -> Spread:
        return spread(ratios((row[figure] for row in rows), (row[figure] for row in baseline)))

    speed = to_baseline("throughput")
    figures = [
        f"{median('total_s'):,.1f}",
        f"{speed.median:.2f} [{speed.least:.2f}, {speed.most:.2f}]",
        f"{to_baseline('tail_s').median:.2f}",
        f"{median('preemptions'):,.0f}",
        f"{median('migrations'):,.0f}",
        f"{median('kv_usage'):.2f}",
    ]
    return f"| {shown} | {rows[0]['policy']} | {' | '.join(figures)} |"


HEADER = """\
| | policy | total, s | throughput to veRL's [least, most] | tail | preemptions | moves | KV in use |
|---|---|---:|---:|---:|---:|---:|---:|"""


def contest(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure every cell and print the table as it comes."""
    table: list[dict[str, Any]] = []
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    print(HEADER)
    for share in arguments.shares:
        for size in arguments.sizes:
            case = workload(share, size, arguments)
            baseline: list[dict[str, Any]] = []
            for policy in (BASELINE, *arguments.policies):
                rows = [measure(case, policy, seed, arguments.set) for seed in seeds]
                baseline = baseline or rows
                print(row_text(rows, baseline, case.name if policy == BASELINE else ""), flush=True)
                table += rows
    return table


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example:\n  python benchmarks/prompt_shares.py --shares 0.25 --seeds 3 --json rows.json",
    )
    parser.add_argument(
        "--policies", nargs="+", choices=list(POLICIES), default=[DIVIDED, CONTEXT], metavar="POLICY"
    )
    parser.add_argument("--shares", nargs="+", type=float, default=SHARES, help="of the context, prompts")
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES, help="responses per group")
    parser.add_argument("--context", type=int, default=8192, help="tokens of the longest context")
    parser.add_argument("--requests", type=int, default=960, help="responses of an iteration")
    parser.add_argument("--instances", type=int, default=4)
    parser.add_argument("--pressure", type=float, default=4.0, help="KV needed over KV there is")
    add_options(parser, 5, "iterations per cell")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> None:
    """Run the benchmark."""
    arguments = parse(argv)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    command = shlex.join(["python", "benchmarks/prompt_shares.py", *argv])
    table = contest(arguments)
    report(command, table, arguments.json)


if __name__ == "__main__":
    main(sys.argv[1:])
