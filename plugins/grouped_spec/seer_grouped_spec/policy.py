"""How many draft tokens are worth verifying: the paper's marginal-benefit-aware policy (MBA), pure.

A step that verifies drafts takes longer and gives more tokens.  Both sides are measured: T(B, gamma) is a
profile of the engine, acceptance is learnt online.  Speculation is on only where the expected tokens per
second exceed those of plain steps; no clock, no chance and no I/O is involved.

It measures how acceptance falls with position, and gives one draft length per class of requests;
``TokenChoice`` uses each token's probability and does better, but needs the drafts themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, chain, repeat
from math import ceil, inf, isfinite, log
from typing import TYPE_CHECKING, Any

import numpy as np

from seer_core.ports.drafting import StepTimes
from seer_grouped_spec.curves import StepCurves

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.floating[Any]]

__all__ = ["MarginalBenefit"]

HALF_LIFE_DRAFTS = 256
"""Verified drafts after which what was learnt of acceptance counts half."""

PRIOR_ACCEPTANCE = 0.41
"""First guess for position 1: with it, 8 drafts give the paper's 1.70 tokens a step (no sibling finished)."""

PRIOR_DRAFTS = 16.0
"""Verified drafts that the first guess counts for."""

EXPLORE_EVERY = 64
"""Least number of plain steps between two that draft only to learn."""

EXPLORE_SHARE = 0.01
"""Most that exploring may cost, as a share of the time of plain steps."""

EXPLORE_HOPE = 0.8
"""Acceptance per position at which speculation must pay for exploring to make sense."""


class MarginalBenefit:
    """The paper's Algorithm 1 (arXiv 2511.14617), a ``DraftPolicy`` for one instance.

    Of B requests, B_h are probes.  beta[j] is the probability that positions 1 to j of a draft are all
    accepted, given that it was that long; so a draft of g tokens gives 1 + beta[1] + ... + beta[g] tokens
    in expectation.  ``lengths`` returns the pair (g_h, g_l) with g_h >= g_l, neither above
    ``max_draft_tokens``, that gives the most tokens per second,

        (B_h (1 + S[g_h]) lambda + B_l (1 + S[g_l])) / T(B, g),    S[g] = beta[1] + ... + beta[g]

    with g = (B_h g_h + B_l g_l) / B draft tokens per request, where a token of a probe counts
    ``priority_factor`` (lambda) times; and only among pairs that, counting all tokens alike, give at least
    ``least_gain`` more than B / T(B, 0).  Without such a pair speculation is off: (0, 0).  The length of an
    empty class is 0.  Among equals the shorter drafts win.

    Where this differs from the paper, and why:

    - Its T_SD takes acceptance to be a constant a per position, hence (1 - a) / (1 - a^(g+1)).  We
      sum the measured beta, which is the same thing where acceptance is constant.
    - Its benefit of a class's next position is B_x (beta[g_x] - beta[g_x + 1]), how fast acceptance falls.
      The tokens that the position adds are B_x beta[g_x + 1] in expectation, at a cost of B_x
      positions.  With the paper's, the larger class wins almost always, even at a low acceptance.
    - It fixes a budget of draft tokens first, for equal lengths, and hands it out greedily.  There are
      only (gamma_max + 1)^2 pairs: we evaluate all.

    beta is a mean of verdicts that decays with ``HALF_LIFE_DRAFTS``.  Before any, it is
    ``PRIOR_ACCEPTANCE`` to the power j; a position that is not drafted any more falls back on the one before
    it, times beta[1].  While speculation is off nothing would be learnt: so every ``EXPLORE_EVERY``-th
    plain step, or so much less often that it costs at most ``EXPLORE_SHARE``, drafts one token per request,
    where drafts could pay at all (``EXPLORE_HOPE``).

    ``refresh``: calls of ``record_acceptance`` between two looks at what was learnt.  ``allowed`` are the
    lengths to choose from, if they are not all.
    """

    def __init__(
        self,
        step_times: StepTimes,
        max_draft_tokens: int = 8,
        priority_factor: float = 2.0,
        *,
        refresh: int = 16,
        least_gain: float = 0.02,
        allowed: Sequence[int] = (),
    ) -> None:
        if max_draft_tokens < 0:
            raise ValueError(f"max_draft_tokens = {max_draft_tokens} is negative")
        if not (isfinite(priority_factor) and priority_factor >= 1):
            raise ValueError(f"priority_factor = {priority_factor} is not a number from 1 on")
        if refresh < 1:
            raise ValueError(f"refresh = {refresh} is less than 1")
        self._longest = max_draft_tokens
        self._priority = priority_factor
        self._refresh = refresh
        self._threshold = 1.0 + least_gain
        self._curves = _curves(step_times, max_draft_tokens)
        self._lengths = self._curves.lengths
        self._speculates = self._lengths[:, None] >= np.maximum(self._lengths, 1)
        self._allowed = np.isin(self._lengths, allowed) if allowed else np.full(len(self._lengths), True)
        self._hope = _tokens([EXPLORE_HOPE**j for j in self._lengths[1:].tolist()])
        self._drafted = [0.0] * max_draft_tokens
        self._accepted = [0.0] * max_draft_tokens
        self._learnt = 0
        self._idle_steps = 0
        self._exploring = False
        self._patience: dict[int, int] = {}
        self._plans: dict[tuple[int, int], tuple[int, int]] = {}
        self._look()

    @property
    def acceptance(self) -> tuple[float, ...]:
        """Return beta[1], beta[2], ... as in use now."""
        return self._beta

    @property
    def exploring(self) -> bool:
        """Whether drafts were last wanted only to learn, and their verdict has not come: pass it on."""
        return self._exploring

    def lengths(self, probes: int, others: int) -> tuple[int, int]:
        """Return the draft tokens per probe and per other request for a step of so many; (0, 0) is off."""
        plan = self._plans.get((probes, others))
        if plan is None:
            plan = self._plans[probes, others] = self._plan(probes, others, self._tokens)
        if plan == (0, 0) and self._explores(probes + others):
            return int(probes > 0), int(others > 0)
        return plan

    def record_acceptance(self, drafted_at: Sequence[float], accepted_at: Sequence[float]) -> None:
        """Take in how many drafts reached position 1, 2, ..., and how many were accepted there."""
        if len(drafted_at) != len(accepted_at):
            raise ValueError(f"{len(drafted_at)} positions drafted, {len(accepted_at)} accepted")
        verified = drafted_at[0] if drafted_at else 0.0
        if verified > 0:
            keep = 0.5 ** (verified / HALF_LIFE_DRAFTS)
            # Many drafts at once decay among themselves as well: the mean of keep over them.
            weight = (1.0 - keep) * HALF_LIFE_DRAFTS / (log(2.0) * verified)
            self._drafted = _decayed(self._drafted, keep, drafted_at, weight)
            self._accepted = _decayed(self._accepted, keep, accepted_at, weight)
        self._learnt += 1
        explored = self._exploring and verified > 0
        if explored or self._learnt % self._refresh == 0:
            self._exploring &= not explored
            self._look()

    def tokens_per_s(self, probes: int, others: int, lengths: tuple[int, int]) -> float:
        """Return the tokens per second that drafts of these lengths give, by what is known now."""
        batch = probes + others
        drafts = (probes * lengths[0] + others * lengths[1]) / batch
        tokens = probes * self._tokens[lengths[0]] + others * self._tokens[lengths[1]]
        seconds = self._curves.between(batch, np.array(drafts))
        return float(tokens / seconds)

    def fastest(self, batch: int) -> int:
        """Return with which length of drafts a step of so many requests takes least, accepted or not."""
        curve = self._curves[batch]
        return int(np.where(self._allowed, curve, inf).argmin())

    def _look(self) -> None:
        """Draw beta from what was learnt, and let all plans be made anew."""
        beta: list[float] = []
        guess = PRIOR_ACCEPTANCE
        for drafted, accepted in zip(self._drafted, self._accepted, strict=True):
            share = (accepted + PRIOR_DRAFTS * guess) / (drafted + PRIOR_DRAFTS)
            beta.append(max(0.0, min(share, beta[-1] if beta else 1.0)))
            guess = beta[-1] * beta[0]
        self._beta = tuple(beta)
        self._tokens = _tokens(beta)
        self._plans.clear()

    def _plan(self, probes: int, others: int, tokens: Floats) -> tuple[int, int]:
        batch = probes + others
        if batch == 0 or self._longest == 0:
            return 0, 0
        seconds = _seconds(self._curves, probes, others)
        ours, theirs = seconds.shape
        probe_tokens = probes * tokens[:ours, None]
        other_tokens = others * tokens[:theirs]
        plain_s = self._curves[batch][0]
        pays = (probe_tokens + other_tokens) * plain_s > self._threshold * batch * seconds
        if probes and others:
            pays &= self._speculates
        else:
            pays[0, 0] = False
        pays &= self._allowed[:ours, None] & self._allowed[:theirs]
        worth = np.where(pays, (self._priority * probe_tokens + other_tokens) / seconds, -inf)
        best = int(worth.argmax())
        return divmod(best, theirs) if worth.item(best) > 0 else (0, 0)

    def _explores(self, batch: int) -> bool:
        """Count a plain step, and say whether it should draft all the same."""
        patience = self._patience.get(batch)
        if patience is None:
            patience = self._patience[batch] = self._least_pause(batch)
        if patience == 0:
            return False
        self._idle_steps += 1
        if self._idle_steps < patience:
            return False
        self._idle_steps = 0
        self._exploring = True
        return True

    def _least_pause(self, batch: int) -> int:
        """Return every how many plain steps of this batch one may explore; 0 is never."""
        if batch == 0 or self._plan(0, batch, self._hope) == (0, 0):
            return 0
        curve = self._curves[batch]
        least = int(self._allowed[1:].argmax()) + 1
        excess = float(curve[least] / curve[0]) - 1.0
        return max(EXPLORE_EVERY, ceil(excess / EXPLORE_SHARE))


@lru_cache(maxsize=4)
def _curves(step_times: StepTimes, longest: int) -> StepCurves:
    """Return the curves that all instances of equal step times share (simulated ones, by the hundred)."""
    return StepCurves(step_times, longest)


@lru_cache(maxsize=4096)
def _seconds(curves: StepCurves, probes: int, others: int) -> Floats:
    """Return T for each pair of draft lengths, float64 [g_h, g_l]; an empty class has length 0 only."""
    ours = curves.lengths[: None if probes else 1, None]
    theirs = curves.lengths[: None if others else 1]
    batch = probes + others
    return curves.between(batch, (probes * ours + others * theirs) / batch)


def _decayed(counts: Sequence[float], keep: float, verdicts: Sequence[float], weight: float) -> list[float]:
    """Return the counts after new verdicts, which may speak of fewer positions, or of more."""
    pairs = zip(counts, chain(verdicts, repeat(0.0)), strict=False)
    return [keep * count + weight * verdict for count, verdict in pairs]


def _tokens(beta: Sequence[float]) -> Floats:
    """Return the tokens that a step with drafts of 0, 1, 2, ... tokens gives a request."""
    return 1.0 + np.array([0.0, *accumulate(beta)])
