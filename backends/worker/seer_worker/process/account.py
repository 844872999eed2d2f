"""The cost of a request, position by position and draft by draft."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import attrs

__all__ = ["RequestStats"]


@attrs.define(eq=False)
class RequestStats:
    """The cost of a request so far, and what became of its drafts.

    ``computed_tokens`` counts positions run through the model, rejected drafts left out; ``pool_tokens``
    those whose KV the pool had when the request was let in; ``spared_steps`` the tokens that came of a step
    beside another one.
    """

    computed_tokens: int = 0
    pool_tokens: int = 0
    spared_steps: int = 0
    _depths: list[int] = attrs.field(factory=list, init=False)
    """Steps by the depth of their drafts, from 0 on."""
    _accepted: list[int] = attrs.field(factory=list, init=False)
    """Steps by the number of drafts that they accepted, of the same length."""

    def verified(self, drafts: Sequence[int], kept: int, last: int) -> None:
        """Book a step that verified ``drafts`` and gave so many tokens, of which ``last`` is the last."""
        accepted = kept - 1
        if accepted < len(drafts) and last == drafts[accepted]:
            accepted += 1  # a draft that ended the chunk
        self.computed_tokens -= len(drafts) + 1 - kept
        self.reached(len(drafts), accepted, kept)

    def reached(self, depth: int, accepted: int, kept: int) -> None:
        """Book a step whose drafts were so deep, of which so many were accepted, and so many tokens kept."""
        self.spared_steps += kept - 1
        missing = depth + 1 - len(self._depths)
        if missing > 0:
            self._depths += [0] * missing
            self._accepted += [0] * missing
        self._depths[depth] += 1
        self._accepted[accepted] += 1

    @property
    def drafted_at(self) -> list[int]:
        """How many steps verified more than j drafts, for each j."""
        return _above(self._depths)

    @property
    def accepted_at(self) -> list[int]:
        """How many steps accepted more than j drafts, for each j that was verified."""
        return _above(self._accepted)


def _above(steps: Sequence[int]) -> list[int]:
    """Return how many steps lie above each number but the last."""
    return list(accumulate(reversed(steps[1:])))[::-1]
