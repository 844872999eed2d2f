"""Which draft tokens to verify: the most probable of the whole batch, as many as pay; pure.

The paper's policy gives every request of a class the same draft length.  But the index knows how likely each
single token is, and a step's cost is known too: so each step takes the tokens that give the most tokens per
second in expectation.  A request in the middle of a phrase drafts eight, its neighbour none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from seer_core.drafting import StepTimes
from seer_grouped_spec.calibration import Calibration
from seer_grouped_spec.step_model import Step, StepModel

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.floating[Any]]
    Bools = NDArray[np.bool_]
    Int32 = NDArray[np.int32]

__all__ = ["TokenChoice"]

PRICES = np.array([0.4, 0.7, 1.0, 1.3, 1.7, 2.5])
"""What a second may have to earn to be spent on drafts, in tokens at the speed of a step without any."""

EXPLORE_EVERY = 64
"""Steps without drafts after which one token is drafted only to learn what drafts are worth, and cost."""


class TokenChoice:
    """Chooses draft tokens for one instance.

    ``priority_factor`` is what a probe's token is worth in tokens of others when tokens compete (the
    paper's lambda); whether drafts pay at all is judged by plain tokens.  They do if they give
    ``least_gain`` more tokens per second than a step without.
    """

    def __init__(
        self,
        step_times: StepTimes,
        max_draft_tokens: int = 8,
        priority_factor: float = 2.0,
        *,
        least_gain: float = 0.02,
    ) -> None:
        self.steps = StepModel(step_times, max_draft_tokens)
        self.calibration = Calibration()
        self._longest = max_draft_tokens
        self._priority = priority_factor
        self._threshold = 1.0 + least_gain
        self._plain_steps = 0

    def choose(self, predicted: Floats, counts: Int32, contexts: Int32, probes: Bools) -> Int32:
        """Return how many of each request's draft tokens to verify, int32 [B].

        ``predicted`` [B, K] is the chance that the draft is accepted up to each token, as the index says;
        rows do not rise, and ``counts[b]`` of row b are there.  ``contexts`` int32 [B] are the requests'
        tokens so far, ``probes`` bool [B] says which are probes.

        At a price per second, each request drafts as many tokens as are worth their time: that is the best
        a step can do for that price.  Of several prices, the one whose step gives the most tokens per
        second wins.
        """
        batch, width = predicted.shape
        there = np.arange(width) < np.minimum(counts, self._longest)[:, None]
        if not there.any():
            return np.zeros(batch, np.int32)
        chances = np.where(there, self.calibration.calibrate(predicted), 0.0)
        gains = np.zeros((batch, width + 1))
        np.cumsum(chances, axis=1, out=gains[:, 1:])
        context = int(contexts.sum())
        plain_s = float(self.steps.seconds(Step(batch, context, 0, 0, 0)))
        each, per_context_token, per_token = self.steps.costs(batch)
        costs = np.zeros((batch, width + 1))
        costs[:, 1:] = per_token * np.arange(1, width + 1)
        costs[:, 1:] += (each + per_context_token * contexts)[:, None]
        worth = gains * np.where(probes, self._priority, 1.0)[:, None]
        prices = PRICES * (batch / plain_s)
        lengths = np.argmax(worth - prices[:, None, None] * costs, axis=2)  # [prices, B]
        drafting = lengths > 0
        steps = Step(batch, context, drafting.sum(axis=1), drafting @ contexts, lengths.sum(axis=1))
        gained = gains[np.arange(batch), lengths].sum(axis=1)
        speeds = (batch + gained) / self.steps.seconds(steps)
        best = int(np.argmax(speeds))
        if not drafting[best].any() or speeds[best] * plain_s <= self._threshold * batch:
            return self._explore(chances)
        self._plain_steps = 0
        chosen: Int32 = lengths[best].astype(np.int32)
        return chosen

    def _explore(self, chances: Floats) -> Int32:
        """Draft nothing, or now and then the one token most likely to be accepted."""
        lengths = np.zeros(len(chances), np.int32)
        self._plain_steps += 1
        if self._plain_steps % EXPLORE_EVERY == 0:
            row = int(np.argmax(chances[:, 0]))
            lengths[row] = chances[row, 0] > 0
        return lengths
