"""Figures over time in bins that widen as time goes on, so that their number is bounded."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["TimeBins"]

BINS = 1024
FIRST_WIDTH_S = 1e-3
ROWS_AT_ONCE = 512
"""Calls of ``add`` that are worked off together."""

Floats = npt.NDArray[np.float64]


class TimeBins:
    """Integrals over time of ``count`` figures, each constant between two calls of ``add``.

    A bin is at first a millisecond wide; whenever time goes beyond the last, pairs of bins become one.
    """

    def __init__(self, count: int) -> None:
        self.width_s = FIRST_WIDTH_S
        self._end_s = 0.0
        self._rows = array("d")
        self._full = ROWS_AT_ONCE * (2 + count)
        self._count = count
        # Integrals of parts of bins, and by how much a figure's value in whole bins changes at each.
        self._parts, self._changes = np.zeros((count, BINS)), np.zeros((count, BINS))

    def add(self, begin_s: float, end_s: float, values: Sequence[float]) -> None:
        """Add figures that had these values from ``begin_s``, 0 at least, to ``end_s``, in seconds."""
        if end_s <= begin_s:
            return
        rows = self._rows
        rows.append(begin_s)
        rows.append(end_s)
        rows.extend(values)
        if len(rows) >= self._full:
            self._take_rows()

    def integrals(self, edges_s: Floats) -> Floats:
        """Return each figure's integral between every two edges, in seconds, as (count, edges - 1)."""
        return np.diff(self.until(edges_s), axis=1)

    def until(self, times_s: Floats) -> Floats:
        """Return each figure's integral up to each time, in seconds, as (count, times)."""
        self._take_rows()
        used = min(int(self._end_s / self.width_s), BINS - 1) + 1
        own = np.minimum(np.arange(used + 1) * self.width_s, self._end_s)
        begun = np.zeros((self._count, 1))
        sums = np.concatenate([begun, np.cumsum(self._sums(), axis=1)[:, :used]], axis=1)
        return np.stack([np.interp(times_s, own, each) for each in sums])

    def _take_rows(self) -> None:
        """Add the rows that have come."""
        if not self._rows:
            return
        table = np.array(self._rows).reshape(-1, 2 + self._count).T
        del self._rows[:]
        self.add_all(table[0], table[1], table[2:])

    def add_all(self, begins_s: Floats, ends_s: Floats, values: Floats) -> None:
        """Add what as many calls of ``add`` would; ``values`` are (count, calls), and no span is empty."""
        if not len(ends_s):
            return
        self._end_s = max(self._end_s, float(ends_s.max()))
        while self._end_s > self.width_s * BINS:
            self._widen()
        width = self.width_s
        last = np.minimum((ends_s / width).astype(np.int64), BINS - 1)
        first = np.minimum((begins_s / width).astype(np.int64), last)
        crosses = first < last
        heads_s = np.where(crosses, (first + 1) * width, ends_s) - begins_s
        rests_s = np.where(crosses, ends_s - last * width, 0.0)
        after = np.minimum(first + 1, BINS - 1)
        self._parts += self._by_bin(first, values * heads_s) + self._by_bin(last, values * rests_s)
        self._changes += self._by_bin(after, values * crosses) - self._by_bin(last, values * crosses)

    def _by_bin(self, bins: npt.NDArray[np.int64], values: Floats) -> Floats:
        """Return the sums of each figure's values, (count, rows), by bin."""
        at = bins + BINS * np.arange(self._count)[:, np.newaxis]
        sums: Floats = np.bincount(at.ravel(), values.ravel(), self._count * BINS).astype(np.float64)
        return sums.reshape(self._count, BINS)

    def _sums(self) -> Floats:
        """Return each figure's integral over each bin."""
        sums: Floats = self._parts + np.cumsum(self._changes, axis=1) * self.width_s
        return sums

    def _widen(self) -> None:
        halves = self._sums().reshape(self._count, BINS // 2, 2).sum(axis=2)
        self._parts = np.concatenate([halves, np.zeros_like(halves)], axis=1)
        self._changes = np.zeros_like(self._parts)
        self.width_s *= 2
