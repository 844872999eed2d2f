"""Figures of runs that repeat one another: the median, the least and the most, and ratios run by run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import attrs

__all__ = ["Spread", "Stats", "is_nonzero", "ratios", "spread"]

LEAST_TIME_S = 0.05
"""A shorter time is shown as 0.0 seconds."""


class Spread(NamedTuple):
    """A figure over some runs."""

    median: float
    least: float
    most: float


def spread(values: Iterable[float]) -> Spread:
    """Return the median, the least and the most of values, of which there is at least one."""
    values = [float(value) for value in values]
    return Spread(median(values), min(values), max(values))


def ratios(mine: Iterable[float], base: Iterable[float]) -> list[float]:
    """Return each run's value divided by that of the run which it is compared with; both in one order."""
    return [value / other for value, other in zip(mine, base, strict=True)]


def is_nonzero(figure: str, value: float) -> bool:
    """Return whether a figure of a ``Summary`` is more than what shows as 0, and so has ratios to it."""
    return value >= LEAST_TIME_S if figure.endswith("time_s") else value != 0


@attrs.frozen
class Stats:
    """One row of a table: for each figure its value in every run, all in the order of the runs."""

    values: Mapping[str, Sequence[float]]

    def spread(self, figure: str) -> Spread:
        """Return a figure's median, least and most."""
        return spread(self.values[figure])

    def ratio(self, figure: str, base: Stats) -> float | None:
        """Return the median of a figure's ratios to that of another row, run by run; None at nothing."""
        others = base.values[figure]
        if not all(is_nonzero(figure, other) for other in others):
            return None
        return median(ratios(self.values[figure], others))

    def ratios(self, base: Stats) -> dict[str, float]:
        """Return the ratio to another row of each figure that has one."""
        found = {figure: self.ratio(figure, base) for figure in self.values}
        return {figure: ratio for figure, ratio in found.items() if ratio is not None}

    def to_json(self) -> dict[str, Any]:
        """Return the median of each figure under its name, and under ``spread`` the least and the most."""
        spreads = {figure: self.spread(figure) for figure in self.values}
        return {
            **{figure: each.median for figure, each in spreads.items()},
            "spread": {figure: [each.least, each.most] for figure, each in spreads.items()},
        }
