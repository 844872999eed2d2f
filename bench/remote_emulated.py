"""How much of its gain does Seer keep in front of servers that run already?

vLLM's scheduler on emulated instances, as Seer's own workers and behind the HTTP dialect of `seer-remote`, on
a virtual clock and without sockets; a request takes 5 ms on its way.  Recorded lengths of DeepCoder 14B (not
published, `--data` names their folder), 40 times shorter, under Seer's policy without drafts; a seed chooses
the iteration.  The servers alone have veRL's policy.  Seer's package ends chunks where KV runs short; without
it vLLM preempts them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from bench.harness import DATA, Row, cell, grouped, markdown
from bench.paced import figures, recorded
from bench.paced_servers import RemoteArm, simulated

DEPENDS_ON = ("seer_core", "plugins", "backends/remote", "backends/paced")
ROUNDS = 1
SHORTER = 40
ALONE, OWN = "servers alone", "own workers, KV shared"
PACKAGE, APART = "servers with Seer's package, KV shared", "servers with Seer's package, KV apart"
ARMS = {
    ALONE: RemoteArm("verl", served=False),
    OWN: RemoteArm("context", served=False, shares=True),
    "own workers, KV apart": RemoteArm("context", served=False),
    PACKAGE: RemoteArm("context", shares=True, ends_early=True),
    APART: RemoteArm("context", ends_early=True),
    "stock servers, KV shared": RemoteArm("context", shares=True),
    "stock servers, KV apart": RemoteArm("context"),
    "stock servers, KV apart, whole chunks reserved": RemoteArm("context", whole=True),
}


def options(parser: argparse.ArgumentParser) -> None:
    """Add the part's own options."""
    parser.add_argument("--shorter", type=int, default=SHORTER, help=f"of the lengths (default {SHORTER})")
    parser.add_argument("--instances", type=int, nargs="+", default=[2, 4], help="(default 2 4)")
    parser.add_argument("--arms", type=int, nargs="+", default=[], help="by number (default all)")
    parser.add_argument("--data", type=Path, default=DATA.parent, help="folder of the recorded lengths")


def run(options: argparse.Namespace) -> list[Row]:
    """Roll out in every arm on each number of instances; a round is a seed."""
    rows: list[Row] = []
    for instances in options.instances:
        load = recorded(options.data, "deepcoder-14b", instances, options.shorter)
        for seed in range(options.rounds):
            for number, (name, arm) in enumerate(ARMS.items()):
                if options.arms and number not in options.arms:
                    continue
                overrides = options.set if arm.policy == "context" else []
                found = figures(simulated(load, arm, seed, overrides))
                row = {"instances": instances, "seed": seed, "arm": name, "shorter": options.shorter}
                rows.append(row | found)
                print(
                    f"{instances}, {seed}, {name}: {found['total_time_s']:.2f} s", file=sys.stderr, flush=True
                )
    return rows


def _gains(arms: dict[str, list[Row]], arm: str) -> list[float]:
    """Return by how much less time an arm takes than the servers alone, seed by seed."""
    alone = [row["total_time_s"] for row in arms[ALONE]]
    return [1 - row["total_time_s"] / its for row, its in zip(arms[arm], alone, strict=True)]


def table(rows: Sequence[Row]) -> str:
    """Return one line for each arm."""
    columns = ["instances", "", "total, s", "less than alone", "tail, s", "chunks", "moves"]
    columns += ["computed again", "preemptions"]
    lines = []
    for instances, arms in grouped(rows, "instances", "arm").items():
        for arm, mine in arms.items():
            line = [str(instances), arm, cell(row["total_time_s"] for row in mine)]
            line.append(cell(_gains(arms, arm), ".1%") if ALONE in arms else "")
            line.append(cell(row["tail_time_s"] for row in mine))
            names = ("chunks", "migrations", "recomputed_tokens", "preemptions")
            lines.append(line + [cell((row[name] for row in mine), ",.0f") for name in names])
    return markdown(columns, lines, left=2)


def answer(rows: Sequence[Row]) -> str:
    """Return the gain of own workers, and what is left of it in front of servers."""
    sentences = []
    for instances, arms in grouped(rows, "instances", "arm").items():
        own, shared, apart = (f"{100 * median(_gains(arms, arm)):.1f} %" for arm in (OWN, PACKAGE, APART))
        sentences.append(
            f"In front of {instances} emulated servers that share KV, Seer takes {shared} less time than they"
            f" alone; with its own workers it takes {own} less, and {apart} where servers share no KV."
        )
    return " ".join(sentences)
