"""A picture of rollouts: instances as rows, chunks as bars over time, the tail shaded, one panel each."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from seer_cli.output import replacing

from seer_lab.chunk_bars import ChunkBar, RolloutBars

__all__ = ["draw_rollouts"]

COLOURS = {"first response of a group": "#d95f02", "other responses": "#1b6ca8"}
"""Two colours of different lightness as well, for the colour-blind."""

TAIL = "#9a9a9a"
BAND = 0.9
"""Share of an instance's row that its lanes take."""


def draw_rollouts(path: Path, rollouts: Mapping[str, RolloutBars]) -> None:
    """Draw rollouts by name, one above the other on one axis of time.

    Raises:
        OutputError: the file cannot be written.
    """
    rows = sum(len(each.instances) for each in rollouts.values())
    figure = Figure(figsize=(10, 1 + 0.35 * rows + 0.6 * len(rollouts)), layout="constrained", dpi=120)
    FigureCanvasAgg(figure)
    heights = [len(each.instances) for each in rollouts.values()]
    panels = figure.subplots(len(rollouts), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (name, rollout) in zip(panels, rollouts.items(), strict=True):
        row_of = {each: row for row, each in enumerate(rollout.instances)}
        for (label, colour), probe in zip(COLOURS.items(), (True, False), strict=True):
            boxes = [
                _box(bar, row_of[bar.instance_id], rollout.lanes)
                for bar in rollout.bars
                if bar.probe == probe
            ]
            bars = PolyCollection(boxes, facecolor=colour, edgecolor="none", label=label, rasterized=True)
            axes.add_collection(bars)
        tail_s = rollout.end_s - rollout.tail_s
        axes.axvspan(
            rollout.tail_s, rollout.end_s, color=TAIL, alpha=0.25, linewidth=0, label="tail: the last tenth"
        )
        axes.set_title(f"{name}: {rollout.end_s:,.1f} s, tail {tail_s:,.1f} s", loc="left", fontsize=10)
        axes.set(ylim=(len(row_of), 0), yticks=[row + 0.5 for row in row_of.values()])
        axes.set_yticklabels(list(row_of), fontsize=8)
    panels[0].set_xlim(0, max(each.end_s for each in rollouts.values()))
    panels[0].legend(loc="upper right", fontsize=8)
    panels[-1].set_xlabel("seconds; a bar begins when its chunk is sent to the instance")
    with replacing(path) as new:
        figure.savefig(new, facecolor="white")


def _box(bar: ChunkBar, row: int, lanes: int) -> list[tuple[float, float]]:
    """Return the corners of a bar."""
    top, bottom = (row + BAND * (bar.lane + end) / lanes for end in (0.0, 1.0))
    return [(bar.begin_s, top), (bar.end_s, top), (bar.end_s, bottom), (bar.begin_s, bottom)]
