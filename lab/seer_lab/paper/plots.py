"""Bars for each table, ours beside the paper's, and what each workload looked like over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from seer_cli.output import replacing

from seer_lab.paper.numbers import ABLATION
from seer_lab.paper.runs import PaperArm, Runs
from seer_lab.paper.show import Outcome, by_table
from seer_lab.plots import draw

__all__ = ["draw_all"]

BAR = 0.38
"""Width of a bar; two stand on one place."""


def draw_all(directory: Path, outcomes: Sequence[Outcome], runs: Runs) -> None:
    """Draw what there is into ``directory``.

    Raises:
        OutputError: a file cannot be written.
    """
    for name, here in by_table(outcomes):
        _bars(directory / f"{name}.svg", name, here)
    for workload, policies in ABLATION.items():
        arms = [PaperArm(workload, policy) for policy in ("verl", *policies)]
        if all(arm in runs for arm in arms):
            draw(directory / f"{workload}.svg", [runs[arm][0] for arm in arms])


def _bars(path: Path, name: str, outcomes: Sequence[Outcome]) -> None:
    workloads = list(dict.fromkeys(outcome.row.workload for outcome in outcomes))
    figure = Figure(figsize=(9, 1 + 0.34 * len(outcomes) + 0.6 * len(workloads)), layout="constrained")
    FigureCanvasAgg(figure)
    by_workload = [[each for each in outcomes if each.row.workload == one] for one in workloads]
    all_axes = figure.subplots(
        len(workloads), 1, squeeze=False, height_ratios=[len(here) + 1 for here in by_workload]
    )
    for axes, workload, here in zip(all_axes[:, 0], workloads, by_workload, strict=True):
        places = range(len(here))
        papers = [outcome.row.paper for outcome in here]
        axes.barh([place - BAR / 2 for place in places], papers, BAR, color="C7", label="paper")
        axes.barh([place + BAR / 2 for place in places], [each.ours for each in here], BAR, label="here")
        axes.set_yticks(places, [outcome.row.name for outcome in here])
        axes.invert_yaxis()
        axes.set_title(workload, loc="left")
    all_axes[0, 0].legend()
    figure.suptitle(name)
    with replacing(path) as new:
        figure.savefig(new)
