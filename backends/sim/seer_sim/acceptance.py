"""How many draft tokens a simulated model accepts, by finished siblings and position."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

import msgspec

__all__ = ["Acceptance", "share_out"]

PAPER_SIBLINGS = (0, 1, 5, 15)
PAPER_MEAN_LENGTHS = (1.70, 2.04, 2.32, 2.53)
"""Mean acceptance length by finished siblings, linear drafts (arXiv 2511.14617, grouped drafting)."""

PAPER_DRAFT_TOKENS = 8
"""Draft tokens with which the paper reaches them (its gamma_max)."""

POSITIONS = 16
"""Positions of a table made from mean lengths; hardly anything beyond would be accepted."""


class Acceptance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Keys of ``[engine.sim.acceptance]``; row i speaks for ``siblings[i]`` finished siblings and more.

    ``mean_lengths[i]`` is the number of tokens that a step with 8 draft tokens gives, the one that needs
    no draft included; each position is accepted with the same probability once all before it are.
    ``rates`` says it exactly instead: ``rates[i][j]`` is the share of drafts that are accepted up to
    position j + 1, of those that are so long.  Longer drafts than a row are cut to it.
    """

    siblings: tuple[int, ...] = PAPER_SIBLINGS
    mean_lengths: tuple[float, ...] = PAPER_MEAN_LENGTHS
    rates: tuple[tuple[float, ...], ...] | None = None

    def __post_init__(self) -> None:
        if self.siblings[:1] != (0,) or any(a >= b for a, b in pairwise(self.siblings)):
            raise ValueError("siblings must rise from 0")
        name, rows = ("mean_lengths", self.mean_lengths) if self.rates is None else ("rates", self.rates)
        if len(rows) != len(self.siblings):
            raise ValueError(f"{name} has {len(rows)} rows for {len(self.siblings)} of siblings")
        if self.rates is None:
            if not all(1 <= length <= 1 + PAPER_DRAFT_TOKENS for length in self.mean_lengths):
                raise ValueError(f"mean_lengths must lie between 1 and {1 + PAPER_DRAFT_TOKENS} tokens")
        elif not all(all(a >= b for a, b in pairwise((1.0, *row, 0.0))) for row in self.rates):
            raise ValueError("rates must be shares that do not rise along a row")

    def row(self, siblings_finished: int) -> int:
        """Return the number of the row that speaks for so many finished siblings."""
        return bisect_right(self.siblings, siblings_finished) - 1

    def table(self) -> tuple[tuple[float, ...], ...]:
        """Return, by row and position, the probability that a draft is accepted so far at least."""
        if self.rates is not None:
            return self.rates
        return tuple(_geometric(length) for length in self.mean_lengths)


def _geometric(mean_length: float) -> tuple[float, ...]:
    """Return a, a ** 2, ... such that the first ``PAPER_DRAFT_TOKENS`` and 1 add up to ``mean_length``."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if sum(middle**j for j in range(PAPER_DRAFT_TOKENS + 1)) < mean_length:
            low = middle
        else:
            high = middle
    return tuple(high**j for j in range(1, POSITIONS + 1))


def share_out(accepted: int, drafted_at: Sequence[int], rates: Sequence[float]) -> list[int]:
    """Return how many steps accepted position 1, 2, ..., ``accepted`` in all and as ``rates`` expect.

    No number is above the one before it, nor above ``drafted_at``, whose sum is ``accepted`` at least.
    """
    if not drafted_at:
        return []
    expected = [drafted * rate for drafted, rate in zip(drafted_at, rates, strict=False)]
    scale = accepted / (sum(expected) or 1.0)
    counts: list[int] = []
    left = accepted
    for drafted, share in zip(drafted_at, expected, strict=True):
        counts.append(min(round(share * scale), drafted, left, *counts[-1:]))
        left -= counts[-1]
    while left:
        for j, drafted in enumerate(drafted_at):
            ceiling = min(drafted, counts[j - 1]) if j else drafted
            if left and counts[j] < ceiling:
                counts[j] += 1
                left -= 1
    return counts
