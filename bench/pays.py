"""When does Seer pay: over how crowded the KV is, and how heavy the tail of the lengths?

Drawn lengths, 64 groups of 8 responses of 4,096 tokens on average on four simulated instances, under veRL's
policy, under Seer's scheduling alone (`context`) and with drafts (`seer`; their acceptance is the paper's).
Lengths are log-normal: at sigma 0.3 the longest responses are twice the mean, at 1.5 they reach the cap of
four times it.  A group's lengths have half of their variance in common.  Instances are of Qwen2-VL-72B on 8
H800, with costs fitted to the paper, or of Qwen3-32B on 4 H100, with costs fitted to published measurements
(cost_models.md).  A step that drafts takes 10 ms more on the former (assumed), and 0.4 ms and 0.08 ms for
each request on the latter (gpu-h100.md).
`seer sweep` does the same with your lengths, as many instances as you have, and the policies that you name.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from seer_lab.policies import POLICIES
from seer_lab.sweep import sweep, swept_workloads

from bench.harness import Row, cell, less, markdown

DEPENDS_ON = ("seer_core", "plugins", "backends/sim", "lab")
ROUNDS = 5
NAMES = ("verl", "context", "seer")
PRESSURES = (0.5, 1, 2, 3, 4, 6)
SIGMAS = (0.3, 0.6, 0.9, 1.2, 1.5)
ON = ("qwen2-vl-72b", "qwen3-32b")
"""Instances whose costs are fitted to the paper, and to published measurements."""


def options(parser: argparse.ArgumentParser) -> None:
    """Add the case's own options."""
    parser.add_argument("--on", default=ON[0], choices=ON, help=f"model and GPUs (default {ON[0]})")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the ratios, as SVG or PNG")


def run(options: argparse.Namespace) -> list[Row]:
    """Simulate each combination under each policy; a round is a seed."""
    axes = {"pressure": PRESSURES, "sigma": SIGMAS}
    workloads = swept_workloads("synthetic", axes, options.set, on=options.on)
    rollouts = len(workloads) * len(NAMES) * options.rounds

    def progress(simulated: int) -> None:
        if simulated % 15 == 0:
            print(f"{simulated} of {rollouts} rollouts", file=sys.stderr, flush=True)

    points = sweep(workloads, [POLICIES[name] for name in NAMES], range(options.rounds), progress)
    if options.picture:
        from seer_lab.sweep_picture import draw_sweep

        draw_sweep(options.picture, axes, points)
    return [{"on": options.on, **point.to_json()} for point in points]


def table(rows: Sequence[Row]) -> str:
    """Return one line for each tail and policy, and one column for each pressure."""
    columns = ["sigma", "policy", *(f"pressure {pressure}" for pressure in PRESSURES)]
    found = {(row["at"]["sigma"], row["at"]["pressure"]): row["policies"] for row in rows}
    lines = [
        [
            str(sigma),
            name,
            *(cell(found[sigma, pressure][name]["ratio_to_first"], ".2f") for pressure in PRESSURES),
        ]
        for sigma in SIGMAS
        for name in NAMES[1:]
    ]
    return markdown(columns, lines, left=2)


def answer(rows: Sequence[Row]) -> str:
    """Return where each policy saves least and most."""
    sentences = []
    for name, what in (("context", "Scheduling alone takes"), ("seer", "With drafts Seer takes")):
        saved = {
            (row["at"]["pressure"], row["at"]["sigma"]): 1
            - 1 / row["policies"][name]["ratio_to_first"]["median"]
            for row in rows
        }
        least, most = min(saved, key=saved.__getitem__), max(saved, key=saved.__getitem__)
        sentences.append(
            f" {what} {less(saved[least])} time than veRL's policy at pressure {least[0]} and sigma"
            f" {least[1]}, and {less(saved[most])} at pressure {most[0]} and sigma {most[1]}."
        )
    return (
        "Seer pays where KV is short for the responses in flight (pressure) and lengths differ (sigma)."
        f"{''.join(sentences)} These are instances of {rows[0]['on']}."
    )
