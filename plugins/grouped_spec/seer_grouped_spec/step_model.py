"""How long the next step will take: the profile, corrected by the steps that are really made; pure.

T(B, gamma) is measured on short contexts and on drafts of one length.  Real steps differ: contexts are
long, and only some requests draft.  With vLLM's CPU attention, a request that verifies one draft token costs
three times one that verifies none, in proportion to its context, and seven more cost little.  So the
profile is corrected by a linear model of what a step is made of, fitted to the measured steps as they come.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from seer_core.drafting import StepTimes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.floating[Any]]
    Ints = NDArray[np.integer[Any]]

__all__ = ["Step", "StepModel"]

HALF_LIFE_STEPS = 1024
"""Steps after which what was learnt of them counts half."""

PRIOR_STEPS = 8.0
"""Steps that trust in the profile counts for."""

REFRESH = 32
"""Steps between two fits."""

OUTLIER = 2.0
"""A step is taken to have lasted at most so many times what was expected: others use the machine too."""

UNITS = np.array([1.0, 32.0, 16384.0, 8.0, 8192.0, 32.0])
"""Sizes of the features of ``Step`` at which a correction is as likely as any other's, by magnitude."""


class Step(NamedTuple):
    """What one decoding step is made of, or, where the last three are arrays, several.

    ``batch`` requests with ``context_tokens`` in all; ``drafting`` of them, with ``drafting_context_tokens``
    in all, verify ``draft_tokens``.
    """

    batch: int
    context_tokens: int
    drafting: int | Ints
    drafting_context_tokens: int | Ints
    draft_tokens: int | Ints


class StepModel:
    """Predicts seconds per step; learns from every step it is told of."""

    def __init__(self, step_times: StepTimes, max_draft_tokens: int) -> None:
        self._step_times = step_times
        self._lengths = np.arange(max_draft_tokens + 1)
        self._curves: dict[int, Floats] = {}
        size = len(UNITS)
        self._moments = np.eye(size) * PRIOR_STEPS
        self._target = np.zeros(size)
        self._seen = np.zeros((REFRESH, size))
        self._missed = np.zeros(REFRESH)
        self._count = 0
        self._weights = [0.0] * size
        self._scale = float(self._curve(1)[0]) / UNITS

    def seconds(self, step: Step) -> Floats:
        """Return the seconds of each step; never less than a tenth of what the profile says."""
        profile = self._profile_s(step)
        fixed, each, context, drafting, drafting_context, token = self._weights
        correction = (
            fixed
            + each * step.batch
            + context * step.context_tokens
            + drafting * step.drafting
            + drafting_context * step.drafting_context_tokens
            + token * step.draft_tokens
        )
        seconds: Floats = np.maximum(profile + correction, profile / 10)
        return seconds

    def costs(self, batch: int) -> tuple[float, float, float]:
        """Return what drafting adds, in seconds: per request, per token of its context, per draft token.

        The last is the mean over the profile's draft lengths.
        """
        curve = self._curve(batch)
        slope = float(curve[-1] - curve[0]) / (batch * max(1, len(curve) - 1))
        _, _, _, drafting, drafting_context, token = self._weights
        return drafting, drafting_context, slope + token

    def learn(self, step: Step, seconds: float) -> None:
        """Take in how long a step really took."""
        profile = float(self._profile_s(step))
        limited = min(seconds, OUTLIER * float(self.seconds(step)))
        # Relative to the step's size, so that small steps count as much as large ones.
        self._seen[self._count] = (1.0, *step)
        self._seen[self._count] *= self._scale / profile
        self._missed[self._count] = limited / profile - 1.0
        self._count += 1
        if self._count == REFRESH:
            self._fit()

    def _fit(self) -> None:
        keep = 0.5 ** (REFRESH / HALF_LIFE_STEPS)
        prior = (1.0 - keep) * PRIOR_STEPS * np.eye(len(UNITS))
        self._moments = keep * self._moments + prior + self._seen.T @ self._seen
        self._target = keep * self._target + self._seen.T @ self._missed
        self._weights = (np.linalg.solve(self._moments, self._target) * self._scale).tolist()
        self._count = 0

    def _profile_s(self, step: Step) -> Floats:
        drafts = np.asarray(step.draft_tokens / step.batch)
        return np.asarray(np.interp(drafts, self._lengths, self._curve(step.batch)))

    def _curve(self, batch: int) -> Floats:
        """Return T(batch, 0), T(batch, 1), ... of the profile."""
        curve = self._curves.get(batch)
        if curve is None:
            seconds = [self._step_times.at(batch, tokens) for tokens in self._lengths.tolist()]
            curve = self._curves[batch] = np.array(seconds)
        return curve
