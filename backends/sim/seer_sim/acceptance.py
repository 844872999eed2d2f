"""How many draft tokens a simulated model accepts, by finished siblings and position."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated

import msgspec
from msgspec import Meta

from seer_sim.replayed import ReplayedDrafts

__all__ = ["Acceptance", "share_out"]

PAPER_SIBLINGS = (0, 1, 5, 15)
PAPER_MEAN_LENGTHS = {
    1: (1.70, 2.04, 2.32, 2.53),
    2: (1.77, 2.14, 2.44, 2.69),
    4: (1.85, 2.25, 2.59, 2.85),
}
"""Mean acceptance length by number of paths and of finished siblings (arXiv 2511.14617, grouped drafting)."""

PAPER_DRAFT_TOKENS = 8
"""Draft tokens with which the paper reaches them (its gamma_max)."""

POSITIONS = 16
"""Positions of a table made from mean lengths; hardly anything beyond would be accepted."""


class Acceptance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many draft tokens are accepted, by the finished siblings or by the tokens that are written.

    Once all positions before it are accepted, each position of a draft is accepted with the same probability,
    unless ``rates`` gives them.  Drafts longer than a row are cut to it.
    """

    siblings: tuple[int, ...] = PAPER_SIBLINGS
    """Row i of the tables is for so many finished siblings and more; the list rises from 0."""
    tokens: tuple[int, ...] | None = None
    """In place of ``siblings``: row i is for chunks in whose middle so many tokens of the response are
    written, for a drafter that indexes text as it is written.
    """
    mean_lengths: tuple[float, ...] | None = None
    """The tokens that a step with ``draft_tokens`` of them gives, row by row, with the one that needs no
    draft. Without it: the paper's for ``paths``.
    """
    draft_tokens: Annotated[int, Meta(ge=1, le=POSITIONS)] = PAPER_DRAFT_TOKENS
    """The draft tokens of the steps that ``mean_lengths`` describes."""
    rates: tuple[tuple[float, ...], ...] | None = None
    """The exact form: ``rates[i][j]`` is the share of drafts of at least j + 1 tokens that are accepted up to
    position j + 1.
    """
    verified: tuple[tuple[float, ...], ...] | None = None
    """For a drafter that leaves out doubtful tokens: ``verified[i][j]`` is the share of steps that verify
    position j + 1. Then ``rates`` are shares of all steps, and no policy chooses the length of drafts.
    """
    paths: Annotated[int, Meta(ge=1)] = 1
    """How many drafts a request has, of which a step verifies all and accepts the best."""

    replayed: ReplayedDrafts | None = None
    """Recorded responses in place of ``siblings`` and all tables, with a drafter that chooses token by token:
    the file of ``seer sim --drafts``.
    """

    def __post_init__(self) -> None:
        for name, firsts in (("siblings", self.siblings), ("tokens", self.tokens)):
            if firsts is not None and (firsts[:1] != (0,) or any(a >= b for a, b in pairwise(firsts))):
                raise ValueError(f"{name} must rise from 0")
        if self.rates is None and self.mean_lengths is None and self.paths not in PAPER_MEAN_LENGTHS:
            listed = ", ".join(map(str, PAPER_MEAN_LENGTHS))
            raise ValueError(f"mean_lengths of {self.paths} paths are not known, only of {listed}; give them")
        name, rows = ("mean_lengths", self.means) if self.rates is None else ("rates", self.rates)
        key, firsts = ("siblings", self.siblings) if self.tokens is None else ("tokens", self.tokens)
        if len(rows) != len(firsts):
            raise ValueError(f"{name} has {len(rows)} rows for {len(firsts)} of {key}")
        if self.rates is None:
            if not all(1 <= length <= 1 + self.draft_tokens for length in self.means):
                raise ValueError(f"mean_lengths must lie between 1 and {1 + self.draft_tokens} tokens")
        elif not all(all(a >= b for a, b in pairwise((1.0, *row, 0.0))) for row in self.rates):
            raise ValueError("rates must be shares that do not rise along a row")

        if self.verified is not None:
            if self.rates is None or [len(row) for row in self.verified] != [len(row) for row in self.rates]:
                raise ValueError("verified needs rates, row by row as many")
            pairs = zip(self.verified, self.rates, strict=True)
            if not all(1 >= v >= a for shares, rates in pairs for v, a in zip(shares, rates, strict=True)):
                raise ValueError("verified must be shares, none below that of rates")

    @property
    def means(self) -> tuple[float, ...]:
        """Mean lengths as given, or the paper's."""
        return PAPER_MEAN_LENGTHS[self.paths] if self.mean_lengths is None else self.mean_lengths

    def row(self, siblings_finished: int, tokens: int = 0) -> int:
        """Return the number of the row that speaks for so many finished siblings, or tokens written."""
        if self.tokens is not None:
            return bisect_right(self.tokens, tokens) - 1
        return bisect_right(self.siblings, siblings_finished) - 1

    def positions(self, row: int, draft_tokens: int) -> float:
        """Return the positions that a step computes for a request with drafts of so many tokens."""
        if self.verified is None:
            return 1 + self.paths * draft_tokens
        return 1 + self.paths * sum(self.verified[row][:draft_tokens])

    def bare(self, row: int) -> float:
        """Return the share of a request's steps that verify nothing for it."""
        return 0.0 if self.verified is None or not self.verified[row] else 1 - self.verified[row][0]

    def table(self) -> tuple[tuple[float, ...], ...]:
        """Return, by row and position, the probability that a draft is accepted so far at least."""
        if self.rates is not None:
            return self.rates
        return tuple(_geometric(length, self.draft_tokens) for length in self.means)


def _geometric(mean_length: float, draft_tokens: int) -> tuple[float, ...]:
    """Return a, a ** 2, ... such that the first ``draft_tokens`` and 1 add up to ``mean_length``."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if sum(middle**j for j in range(draft_tokens + 1)) < mean_length:
            low = middle
        else:
            high = middle
    return tuple(high**j for j in range(1, POSITIONS + 1))


LEAST_EXPECTED = 1e-9
"""Fewer acceptances than this are none: dividing by them may overflow."""


def share_out(accepted: int, drafted_at: Sequence[int], rates: Sequence[float]) -> list[int]:
    """Return how many steps accepted position 1, 2, ..., ``accepted`` in all and as ``rates`` expect.

    No number is above the one before it, nor above ``drafted_at``, whose sum is ``accepted`` at least.
    """
    if not drafted_at:
        return []
    expected = [drafted * rate for drafted, rate in zip(drafted_at, rates, strict=False)]
    total = sum(expected)
    scale = accepted / total if total > LEAST_EXPECTED else 0.0
    counts: list[int] = []
    left = most = accepted
    for drafted, share in zip(drafted_at, expected, strict=True):
        # Every chunk comes here, and ``min`` of so many takes twice as long.
        if drafted < most:
            most = drafted
        if left < most:
            most = left
        count = round(share * scale)
        if count < most:
            most = count
        counts.append(most)
        left -= most
    while left:
        for j, drafted in enumerate(drafted_at):
            ceiling = min(drafted, counts[j - 1]) if j else drafted
            if left and counts[j] < ceiling:
                counts[j] += 1
                left -= 1
    return counts
