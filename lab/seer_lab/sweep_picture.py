"""A picture of a sweep: lines over one key, a map for each policy over two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from seer_cli.output import replacing

from seer_lab.sweep import SweptPoint, Value

__all__ = ["draw_sweep"]

AXES = {
    "pressure": "pressure: all contexts over the KV there is",
    "sigma": "sigma: weight of the tail",
    "group_share": "group_share: what a group's lengths have in common",
}
"""Titles of keys whose names alone do not say enough."""

MOST = 2.0
"""The ratio from which colours no longer change, so that pictures can be compared."""


def draw_sweep(path: Path, axes: Mapping[str, Sequence[Value]], points: Sequence[SweptPoint]) -> None:
    """Draw each policy's ratio to the first, over one key or over two.

    Raises:
        OutputError: the file cannot be written.
    """
    first, *others = points[0].throughput_tokens_per_s
    keys = list(axes)
    figure = Figure(figsize=(max(6.0, 4.6 * len(others)) if len(keys) == 2 else 7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    if len(keys) == 1:
        _draw_lines(figure, keys[0], axes[keys[0]], points, others)
    else:
        _draw_maps(figure, keys, axes, points, others)
    figure.suptitle(f"tokens per second, over those of {first}", fontsize=11)
    with replacing(path) as new:
        figure.savefig(new, facecolor="white")


def _draw_lines(
    figure: Figure, key: str, values: Sequence[Value], points: Sequence[SweptPoint], others: Sequence[str]
) -> None:
    plot = figure.subplots()
    places = range(len(values))
    for name in others:
        found = [point.ratio(name) for point in points]
        errors = [[each.median - each.least for each in found], [each.most - each.median for each in found]]
        plot.errorbar(places, [each.median for each in found], errors, fmt="o-", capsize=3, label=name)
    plot.axhline(1, color="grey", linewidth=0.8)
    plot.set(xlabel=AXES.get(key, key), ylabel="ratio", xticks=places)
    plot.set_xticklabels([str(value) for value in values])
    plot.legend()


def _draw_maps(
    figure: Figure,
    keys: Sequence[str],
    axes: Mapping[str, Sequence[Value]],
    points: Sequence[SweptPoint],
    others: Sequence[str],
) -> None:
    across, up = keys
    colours = TwoSlopeNorm(1, vmin=1 / MOST, vmax=MOST)
    plots = figure.subplots(1, len(others), squeeze=False, sharey=True)[0]
    for plot, name in zip(plots, others, strict=True):
        ratio = {tuple(point.at.values()): point.ratio(name).median for point in points}
        rows = [[ratio[value, row] for value in axes[across]] for row in axes[up]]
        plot.imshow(rows, origin="lower", aspect="auto", cmap="PuOr", norm=colours)
        for y, row in enumerate(rows):
            for x, found in enumerate(row):
                plot.text(x, y, f"{found:.2f}", ha="center", va="center", fontsize=9)
        plot.set_title(name, fontsize=10)
        plot.set(xlabel=AXES.get(across, across), xticks=range(len(rows[0])), yticks=range(len(rows)))
        plot.set_xticklabels([str(value) for value in axes[across]])
        plot.set_yticklabels([str(value) for value in axes[up]])
    plots[0].set_ylabel(AXES.get(up, up))
