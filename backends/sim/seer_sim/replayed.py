"""The worth of drafts in a replay of recorded responses, stretch by stretch of their text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from hashlib import blake2b
from itertools import pairwise
from math import log
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from seer_core.plugins.config_types import NotNegative, Share

__all__ = ["SEGMENT_TOKENS", "DraftedText", "ReplayedDrafts", "ReplayedResponse"]

SEGMENT_TOKENS = 64
"""Tokens of a response whose steps are counted together."""

LIKE_LENGTHS = 4
"""Recorded responses, nearest in length, of which a simulated one is like one."""

MANY_GROUPS = 32
"""Recorded groups from which on their mean says more of an unseen response than those like it in length."""

SIBLING_ROWS = 4
"""Rows of a table by the finished part of the siblings."""

POSITION_ROWS = 12
"""Rows of a table by the position in a response, each of two stretches; the last one has all beyond."""

FEW_TOKENS = 10 * SEGMENT_TOKENS
"""With less text than this an entry of a table is nearer to the mean than to its own."""

Count = Annotated[int, Meta(ge=1)]


class DraftedText(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Text that is drafted about equally well; each key has an entry for each level of ``chances``."""

    verified: tuple[tuple[Share, ...], ...]
    """``verified[i][j]`` is the share of steps that verify position j + 1 at level i."""
    accepted: tuple[tuple[Share, ...], ...]
    """``accepted[i][j]`` is the share of steps that accept position j + 1 at level i."""
    variance: tuple[NotNegative, ...]
    """How much the accepted tokens that the drafter expects of a step vary."""

    def __post_init__(self) -> None:
        for rows in zip(self.verified, self.accepted, strict=True):
            if not all(a >= b for row in rows for a, b in pairwise(row)):
                raise ValueError("shares must not rise along a row")
            if not all(v >= a for v, a in zip(*rows, strict=True)):
                raise ValueError("verified must not be below accepted")
        if len(self.variance) != len(self.verified):
            raise ValueError(f"variance has {len(self.variance)} levels, verified {len(self.verified)}")

    @property
    def gain(self) -> float:
        """Return the accepted tokens of a step that verifies everything."""
        return sum(self.accepted[0])


class ReplayedResponse(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A recorded response and its steps, where everything drafted is verified."""

    id: str
    """The id of its request: a simulated one of that id and length is drafted as this one is."""
    group: str
    """The id of its group."""
    tokens: Count
    """Its length."""
    steps: Annotated[tuple[Count, ...], Meta(min_length=1)]
    """The steps of each 64 of its tokens, and of the rest."""

    def __post_init__(self) -> None:
        if len(self.steps) != -(-self.tokens // SEGMENT_TOKENS):
            raise ValueError(f"steps must be given for each {SEGMENT_TOKENS} of {self.tokens} tokens")

    def gain(self, start: int, stop: int) -> float:
        """Return the tokens that a step accepts between two tokens; beyond the end it is as at the end."""
        last = len(self.steps) - 1
        first, end = (min(each, last) for each in _stretches(start, stop))
        segments = range(first, end + 1)
        tokens = sum(map(self.tokens_of, segments))
        return max(0.0, tokens / sum(self.steps[each] for each in segments) - 1)

    def tokens_of(self, stretch: int) -> int:
        """Return the tokens of one stretch."""
        return min(SEGMENT_TOKENS, self.tokens - stretch * SEGMENT_TOKENS)


def _stretches(start: int, stop: int) -> tuple[int, int]:
    """Return the first and the last stretch that has one of these tokens."""
    return start // SEGMENT_TOKENS, max(start, stop - 1) // SEGMENT_TOKENS


class GainTable:
    """The mean gain of drafts, by the position in a response and by how many siblings have finished."""

    def __init__(self, responses: Sequence[ReplayedResponse]) -> None:
        lengths: dict[str, list[int]] = {}
        for each in responses:
            lengths.setdefault(each.group, []).append(each.tokens)
        self._siblings = round(len(responses) / len(lengths))
        self._sums: dict[tuple[int, int], list[int]] = {}
        for each in responses:
            group = lengths[each.group]
            for stretch, steps in enumerate(each.steps):
                finished = sum(length < stretch * SEGMENT_TOKENS for length in group)
                sums = self._sums.setdefault(_entry(stretch, finished, len(group)), [0, 0])
                sums[0] += each.tokens_of(stretch)
                sums[1] += steps
        tokens, steps = (sum(each[place] for each in self._sums.values()) for place in (0, 1))
        self._mean = tokens / steps

    def gain(self, start: int, stop: int, siblings_finished: int) -> float:
        """Return the tokens that a step accepts between two tokens of a response."""
        first, last = _stretches(start, stop)
        steps = 0.0
        for stretch in range(first, last + 1):
            found = self._sums.get(_entry(stretch, siblings_finished, self._siblings), (0, 0))
            steps += (found[1] + FEW_TOKENS / self._mean) / (found[0] + FEW_TOKENS)
        return max(0.0, (last - first + 1) / steps - 1)


def _entry(stretch: int, finished: int, siblings: int) -> tuple[int, int]:
    """Return the row of a table for a position, and its column for the finished siblings."""
    row = min(stretch // 2, POSITION_ROWS)
    return row, min(SIBLING_ROWS - 1, SIBLING_ROWS * finished // siblings)


class ReplayedDrafts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """Recorded responses, replayed through a draft index: simulated ones are drafted as well as these are.

    A response that was recorded, of that length, is as it was.  For any other ``unseen`` decides.
    """

    chances: tuple[Share, ...]
    """Levels of choice, rising: a step verifies the drafted tokens that are accepted with such a chance."""
    texts: Annotated[tuple[DraftedText, ...], Meta(min_length=1)]
    """Kinds of text, the one with the least ``gain`` first."""
    responses: Annotated[tuple[ReplayedResponse, ...], Meta(min_length=1)]
    """The recorded responses."""
    unseen: Literal["", "alike", "siblings"] = ""
    """How a response is drafted that was not recorded: like one of those nearest in length, and siblings like
    responses of one group where lengths allow it (`alike`), or as all are on average at its position with as
    many finished siblings (`siblings`). Empty for the latter from 32 groups on.
    """
    draw: int = 0
    """Another number draws other responses, where they are alike."""

    def __post_init__(self) -> None:
        if not self.chances or any(a >= b for a, b in pairwise(self.chances)):
            raise ValueError("chances must rise, and be one at least")
        if any(len(text.verified) != len(self.chances) for text in self.texts):
            raise ValueError("each of texts must have a level for each of chances")
        if any(a > b for a, b in pairwise(self._gains)):
            raise ValueError("texts must be ordered by the sum of accepted[0]")

    @cached_property
    def _gains(self) -> list[float]:
        return [text.gain for text in self.texts]

    @cached_property
    def _recorded(self) -> dict[tuple[str, int], ReplayedResponse]:
        return {(each.id, each.tokens): each for each in self.responses}

    @cached_property
    def _drawn(self) -> dict[tuple[str, int], ReplayedResponse]:
        return {}

    @cached_property
    def _table(self) -> GainTable | None:
        """Return the means that unseen responses are drafted by, None where they are like recorded ones."""
        groups = len({each.group for each in self.responses})
        by_siblings = self.unseen == "siblings" or (not self.unseen and groups >= MANY_GROUPS)
        return GainTable(self.responses) if by_siblings else None

    def gain(
        self, request_id: str, group_id: str, tokens: int, start: int, stop: int, siblings_finished: int
    ) -> float:
        """Return the tokens that a step accepts between two tokens of a response of ``tokens``."""
        recorded = self._recorded.get((request_id, tokens))
        if recorded is None and self._table is not None:
            return self._table.gain(start, stop, siblings_finished)
        return (recorded or self.like(request_id, group_id, tokens)).gain(start, stop)

    def like(self, request_id: str, group_id: str, tokens: int) -> ReplayedResponse:
        """Return the recorded response that one of so many tokens is like."""
        found = self._drawn.get((request_id, tokens))
        if found is None:
            nearest = sorted(self.responses, key=lambda each: abs(log(each.tokens / tokens)))[:LIKE_LENGTHS]
            found = min(nearest, key=lambda each: self._rank(group_id, each.group))
            self._drawn[request_id, tokens] = found
        return found

    def text_of(self, gain: float) -> int:
        """Return which of ``texts`` is drafted about as well as ``gain`` says."""
        return min(range(len(self.texts)), key=lambda each: abs(self._gains[each] - gain))

    def _rank(self, group_id: str, recorded: str) -> bytes:
        name = f"{self.draw} {group_id} {recorded}"
        return blake2b(name.encode(), digest_size=8).digest()
