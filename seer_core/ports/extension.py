"""Responses that are extended by tokens that no engine wrote, such as what an environment answers to a turn.

A response of a group that has ``turns`` is held each time that it stops.  Its extender says what comes next:
tokens after which the engines go on, or the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from seer_core.model.arrays import Tokens
from seer_core.model.requests import PromptGroup, TurnRecord

__all__ = ["Extender", "HeldResponse", "HeldResponses", "MakeExtender"]


class HeldResponse(msgspec.Struct, frozen=True):
    """A response that is held: it has just written a turn, up to a stop."""

    group: PromptGroup
    """Its group."""
    index: int
    """Its number within the group, from 0."""
    seed: int
    """The seed with which its tokens are drawn."""
    token_ids: Tokens
    """Its tokens, extensions included; not to be changed."""
    turns: Sequence[TurnRecord]
    """The turns before this one, in order, each with what extended it."""
    attachments: Mapping[str, Any] = {}
    """The further fields that its chunks have had so far."""

    @property
    def turn_start(self) -> int:
        """Where its turn begins, in tokens from the start of the response."""
        return sum(turn.tokens + turn.answer_tokens for turn in self.turns)


class HeldResponses(Protocol):
    """The responses that are held, and the ways on for each; all methods return at once."""

    def held(self, request_id: str) -> HeldResponse:
        """Return one as it is."""
        ...

    def extend(
        self,
        request_id: str,
        token_ids: Sequence[int],
        reward: float | None,
        done: bool,
        attachments: Mapping[str, Any] | None = None,
    ) -> None:
        """Append tokens, as far as the response has room, and let the engines go on unless it is ``done``.

        Its chunks have ``attachments`` from now on, and without any those that they have had so far.
        """
        ...

    def extension_failed(self, request_id: str, reason: str) -> None:
        """End a response by an error: there is nothing to extend it by, for this reason."""
        ...


class Extender(Protocol):
    """Extends the responses of one rollout."""

    def held(self, request_id: str) -> None:
        """Begin to extend a response, which has just been held; the outcome comes later, never at once."""
        ...

    def over(self, request_id: str) -> None:
        """Give up a response that is over, whether it was held or not."""
        ...

    def stop(self) -> None:
        """Give up all responses."""
        ...

    async def closed(self) -> None:
        """Wait until nothing is done any more for responses that are over."""
        ...


MakeExtender = Callable[[HeldResponses], Extender]
"""Makes the extender of a rollout."""
