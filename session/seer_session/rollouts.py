"""A rollout as its user holds it: groups in, completions out, and in the end the result."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import suppress

import msgspec

from seer_core.model import Completion, PromptGroup
from seer_core.model.events import Event
from seer_core.ports.engine import Clock
from seer_core.ports.journal import Journal
from seer_core.runtime.observers import ObserverHub
from seer_core.runtime.rollout import ControllerCalls, CoreRollout
from seer_core.runtime.transcripts import ClosedRequest, Transcripts
from seer_session.results import RolloutResult, Tally

__all__ = ["MOST_NAMED", "Rollout", "digest_of_prompt"]

MOST_NAMED = 65_536
"""Prompts of which an open rollout remembers how many groups were named after them."""


class Rollout(CoreRollout):
    """Groups under way: an async iterator over their completions, as they finish; see ``CoreRollout``.

    ``named`` counts the groups that were named after each prompt; beyond ``MOST_NAMED`` prompts the least
    recently used ones are dropped.  Without ``keep``, the result holds only completions that were not read.
    """

    def __init__(
        self,
        transcripts: Transcripts,
        clock: Clock,
        observers: ObserverHub,
        controller: ControllerCalls,
        most_requests: int | None = None,
        journal: Journal | None = None,
        *,
        tally: Tally,
        keep: bool = True,
    ) -> None:
        super().__init__(transcripts, clock, observers, controller, most_requests, journal)
        self.named: OrderedDict[str, int] = OrderedDict()
        self._tally = tally
        self._completions: list[Completion] | None = [] if keep else None

    def add(self, groups: Iterable[PromptGroup]) -> None:
        """Roll out these groups as well; see ``CoreRollout.add``."""
        groups = list(groups)
        super().add(groups)
        for group in groups:
            if (name := _named_after(group)) is not None:
                self.named[name] = self.named.pop(name, 0) + 1  # the last one now
                if len(self.named) > MOST_NAMED:
                    self.named.popitem(last=False)

    async def wait(self) -> RolloutResult:
        """Return the whole result once it is closed and everything has finished."""
        with suppress(StopAsyncIteration):
            while True:
                await self._next()
        return self.result

    async def abort(self) -> RolloutResult:
        """Close it, abort all unfinished requests and return the result; see ``leave``."""
        self.leave()
        return await self.wait()

    @property
    def result(self) -> RolloutResult:
        """The finished responses so far, with a summary; only the unread ones if completions are not kept."""
        summary = self._tally.summary(self._transcripts.weight_version, self._observers.failed)
        return RolloutResult(list(self._ready if self._completions is None else self._completions), summary)

    def see(self, event: Event) -> None:
        """Count an event, other than the end of a chunk."""
        super().see(event)
        self._tally.see(event)

    def take(self, closed: ClosedRequest) -> None:
        """Count a completion, keep it, and pass it on to the user."""
        self._tally.add(closed.completion, closed.group_over, closed.resumed_tokens)
        if self._completions is not None:
            self._completions.append(closed.completion)
        super().take(closed)


def _named_after(group: PromptGroup) -> str | None:
    """Return the digest of a group's prompt if that is its id, or its id with a number; None if it is not."""
    digest = digest_of_prompt(group.prompt_token_ids)
    return digest if group.id == digest or group.id.startswith(f"{digest}-") else None


def digest_of_prompt(token_ids: Sequence[int]) -> str:
    """Return 12 hexadecimal digits that depend on a prompt's tokens alone."""
    return hashlib.blake2b(msgspec.msgpack.encode(token_ids), digest_size=6).hexdigest()
