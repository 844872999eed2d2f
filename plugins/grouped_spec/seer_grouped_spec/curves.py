"""T(B, gamma) of a profile as policies read it: one curve per batch size."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from seer_core.ports.drafting import StepTimes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

__all__ = ["StepCurves"]


class StepCurves:
    """Seconds of a step without drafts, with one draft token per request, ..., with ``longest`` each."""

    def __init__(self, step_times: StepTimes, longest: int) -> None:
        self._step_times = step_times
        self.lengths = np.arange(longest + 1)
        self._curves: dict[int, Floats] = {}
        self._slopes: dict[int, Floats] = {}

    def __getitem__(self, batch: int) -> Floats:
        """Return T(batch, 0), T(batch, 1), ..., float64 [longest + 1]."""
        curve = self._curves.get(batch)
        if curve is None:
            seconds = [self._step_times.at(batch, tokens) for tokens in self.lengths.tolist()]
            curve = self._curves[batch] = np.array(seconds)
        return curve

    def between(self, batch: int, drafts: Floats) -> Floats:
        """Return T(batch, g) for fractional g, each in 0 to ``longest``, linearly; any shape.

        As ``np.interp``, which takes three times as long for a handful of values.
        """
        curve = self[batch]
        slopes = self._slopes.get(batch)
        if slopes is None:
            slopes = self._slopes[batch] = np.append(np.diff(curve), 0.0)
        whole = drafts.astype(np.intp)
        seconds: Floats = slopes[whole] * (drafts - whole) + curve[whole]
        return seconds

    def table(self, most: int) -> Floats:
        """Return the curves of batches 1 to ``most``, float64 [most, longest + 1]."""
        return np.array([self[batch] for batch in range(1, most + 1)])
