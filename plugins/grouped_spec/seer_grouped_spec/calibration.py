"""What predicted probabilities turn out to be worth, learnt online; pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.floating[Any]]
    Bools = NDArray[np.bool_]

__all__ = ["Calibration"]

BINS = 16
"""Equal bins of predicted probability."""

HALF_LIFE_TOKENS = 4096
"""Verified draft tokens after which what was learnt of predictions counts half."""

PRIOR_TOKENS = 8.0
"""Verified draft tokens per bin that trust in the prediction counts for."""


class Calibration:
    """What became of tokens drafted with a given probability; monotone, and the identity at first."""

    def __init__(self, refresh: int = 16) -> None:
        self._refresh = refresh
        self._learnt = 0
        self._centres = (np.arange(BINS) + 0.5) / BINS
        self._count = np.zeros(BINS)
        self._predicted = np.zeros(BINS)
        self._accepted = np.zeros(BINS)
        self._draw()

    def calibrate(self, probabilities: Floats) -> Floats:
        """Return the observed acceptance of tokens with these probabilities; order is kept."""
        worth: Floats = np.interp(probabilities, self._from, self._to)
        return worth

    def learn(self, predicted: Floats, accepted: Bools) -> None:
        """Take in the verdicts on draft tokens predicted with these, uncalibrated, probabilities.

        They show after ``refresh`` calls.
        """
        if predicted.size == 0:
            return
        bins = np.clip((predicted * BINS).astype(np.intp), 0, BINS - 1).ravel()
        keep = 0.5 ** (bins.size / HALF_LIFE_TOKENS)
        for total, weights in (
            (self._count, None),
            (self._predicted, predicted.ravel()),
            (self._accepted, accepted.ravel()),
        ):
            total *= keep
            total += np.bincount(bins, weights, BINS)
        self._learnt += 1
        if self._learnt % self._refresh == 0:
            self._draw()

    def _draw(self) -> None:
        """Draw the curve anew: through the bins' means, pooled where they would fall."""
        weights = self._count + PRIOR_TOKENS
        predicted = (self._predicted + PRIOR_TOKENS * self._centres) / weights
        accepted = (self._accepted + PRIOR_TOKENS * self._centres) / weights
        pooled: list[tuple[float, float, int]] = []  # mean, weight, bins: pool adjacent violators
        for mean, weight in zip(accepted.tolist(), weights.tolist(), strict=True):
            size = 1
            while pooled and pooled[-1][0] > mean:
                other, other_weight, other_size = pooled.pop()
                mean = (mean * weight + other * other_weight) / (weight + other_weight)
                weight += other_weight
                size += other_size
            pooled.append((mean, weight, size))
        means = [mean for mean, _, size in pooled for _ in range(size)]
        self._from = np.array([0.0, *predicted, 1.0])
        self._to = np.array([0.0, *means, min(1.0, means[-1] / float(predicted[-1]))])
