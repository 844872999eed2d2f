"""Figures over time in bins that widen as time goes on, so that their number is bounded."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

__all__ = ["TimeBins"]

BINS = 1024
FIRST_WIDTH_S = 1e-3


class TimeBins:
    """Integrals over time of ``count`` figures, each constant between two calls of ``add``.

    A bin is at first a millisecond wide; whenever time goes beyond the last, pairs of bins become one.
    """

    def __init__(self, count: int) -> None:
        self.width_s = FIRST_WIDTH_S
        self._end_s = 0.0
        # Of each figure: integrals of parts of bins, and by how much its value in whole bins changes at each.
        self._figures = [([0.0] * BINS, [0.0] * BINS) for _ in range(count)]

    def add(self, begin_s: float, end_s: float, values: Sequence[float]) -> None:
        """Add figures that had these values from ``begin_s``, 0 at least, to ``end_s``, in seconds."""
        if end_s <= begin_s:
            return
        while end_s > self.width_s * BINS:
            self._widen()
        if end_s > self._end_s:
            self._end_s = end_s
        width = self.width_s
        last = min(int(end_s / width), BINS - 1)
        first = min(int(begin_s / width), last)
        if first == last:
            for (parts, _), value in zip(self._figures, values, strict=True):
                parts[first] += value * (end_s - begin_s)
            return
        head, rest = (first + 1) * width - begin_s, end_s - last * width
        for (parts, changes), value in zip(self._figures, values, strict=True):
            if value:
                parts[first] += value * head
                parts[last] += value * rest
                changes[first + 1] += value
                changes[last] -= value

    def integrals(self, edges_s: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return each figure's integral between every two edges, in seconds, as (count, edges - 1)."""
        used = min(int(self._end_s / self.width_s), BINS - 1) + 1
        own = np.minimum(np.arange(used + 1) * self.width_s, self._end_s)
        begun = np.zeros((len(self._figures), 1))
        sums = np.concatenate([begun, np.cumsum(self._sums(), axis=1)[:, :used]], axis=1)
        return np.diff([np.interp(edges_s, own, each) for each in sums], axis=1)

    def _sums(self) -> list[list[float]]:
        """Return each figure's integral over each bin."""
        return [
            [part + value * self.width_s for part, value in zip(parts, accumulate(changes), strict=True)]
            for parts, changes in self._figures
        ]

    def _widen(self) -> None:
        half = [0.0] * (BINS // 2)
        self._figures = [
            ([*(sums[i] + sums[i + 1] for i in range(0, BINS, 2)), *half], [0.0] * BINS)
            for sums in self._sums()
        ]
        self.width_s *= 2
