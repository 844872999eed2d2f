"""The cost of a request, position by position and draft by draft."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

__all__ = ["RequestStats"]


@attrs.define(eq=False)
class RequestStats:
    """The cost of a request so far, and what became of its drafts.

    ``computed_tokens`` counts positions run through the model, rejected drafts left out; ``pool_tokens``
    those whose KV the pool had when the request was let in; ``spared_steps`` the tokens that came of a step
    beside another one.  ``drafted_at[j]`` steps verified more than j drafts, ``accepted_at[j]`` accepted more
    than j.
    """

    computed_tokens: int = 0
    pool_tokens: int = 0
    spared_steps: int = 0
    drafted_at: list[int] = attrs.field(factory=list)
    accepted_at: list[int] = attrs.field(factory=list)

    def verified(self, drafts: Sequence[int], kept: Sequence[int]) -> None:
        """Book a step that verified ``drafts`` and gave the tokens ``kept``."""
        accepted = len(kept) - 1
        if accepted < len(drafts) and kept[accepted] == drafts[accepted]:
            accepted += 1  # a draft that ended the chunk
        self.computed_tokens -= len(drafts) + 1 - len(kept)
        self.reached(len(drafts), accepted, len(kept))

    def reached(self, depth: int, accepted: int, kept: int) -> None:
        """Book a step whose drafts were so deep, of which so many were accepted, and so many tokens kept."""
        self.spared_steps += kept - 1
        for counts, reached in ((self.drafted_at, depth), (self.accepted_at, accepted)):
            counts.extend([0] * (depth - len(counts)))
            for position in range(reached):
                counts[position] += 1
