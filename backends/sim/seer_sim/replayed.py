"""The worth of drafts in a replay of recorded responses, stretch by stretch of their text."""

from __future__ import annotations

from functools import cached_property
from hashlib import blake2b
from itertools import pairwise
from math import log
from typing import Annotated

import msgspec
from msgspec import Meta

from seer_core.plugins.config_types import NotNegative, Share

__all__ = ["SEGMENT_TOKENS", "DraftedText", "ReplayedDrafts", "ReplayedResponse"]

SEGMENT_TOKENS = 64
"""Tokens of a response whose steps are counted together."""

LIKE_LENGTHS = 4
"""Recorded responses, nearest in length, of which a simulated one is like one."""

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
        segments = range(
            min(start // SEGMENT_TOKENS, last), min(max(start, stop - 1) // SEGMENT_TOKENS, last) + 1
        )
        tokens = sum(min(SEGMENT_TOKENS, self.tokens - each * SEGMENT_TOKENS) for each in segments)
        return max(0.0, tokens / sum(self.steps[each] for each in segments) - 1)


class ReplayedDrafts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """Recorded responses, replayed through a draft index: simulated ones are drafted as well as these are.

    A response that was recorded, of that length, is as it was.  Any other is like one of those that are
    nearest in length, and siblings are like responses of one group where lengths allow it.
    """

    chances: tuple[Share, ...]
    """Levels of choice, rising: a step verifies the drafted tokens that are accepted with such a chance."""
    texts: Annotated[tuple[DraftedText, ...], Meta(min_length=1)]
    """Kinds of text, the one with the least ``gain`` first."""
    responses: Annotated[tuple[ReplayedResponse, ...], Meta(min_length=1)]
    """The recorded responses."""
    draw: int = 0
    """Another number draws other responses."""

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
    def _drawn(self) -> dict[tuple[str, int], ReplayedResponse]:
        return {(each.id, each.tokens): each for each in self.responses}

    def like(self, request_id: str, group_id: str, tokens: int) -> ReplayedResponse:
        """Return the recorded response that one of so many tokens is like."""
        found = self._drawn.get((request_id, tokens))
        if found is None:
            nearest = sorted(self.responses, key=lambda each: abs(log(each.tokens / tokens)))[:LIKE_LENGTHS]
            found = min(nearest, key=lambda each: self._rank(group_id, each.group))
            self._drawn[request_id, tokens] = found
        return found

    def text_of(self, request_id: str, group_id: str, tokens: int, start: int, stop: int) -> int:
        """Return which of ``texts`` a response of ``tokens`` is between two of them."""
        gain = self.like(request_id, group_id, tokens).gain(start, stop)
        return min(range(len(self.texts)), key=lambda each: abs(self._gains[each] - gain))

    def _rank(self, group_id: str, recorded: str) -> bytes:
        name = f"{self.draw} {group_id} {recorded}"
        return blake2b(name.encode(), digest_size=8).digest()
