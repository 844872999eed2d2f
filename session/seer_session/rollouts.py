"""A rollout as its user holds it: groups in, completions out, and in the end the result."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial

import msgspec
from seer_host.images import PlacedImages

from seer_core.model import Completion, PromptGroup, WrittenResponse
from seer_core.model.arrays import Logprobs, Tokens
from seer_core.model.events import ChunkFinished, EnvironmentAnswered, Event
from seer_core.ports.engine import ChunkOutput, Clock
from seer_core.runtime.observers import ObserverHub
from seer_core.runtime.rollout import ControllerCalls, CoreRollout
from seer_core.runtime.transcripts import ClosedRequest, Transcripts
from seer_session.journal import Journal
from seer_session.results import RolloutResult, Tally

__all__ = ["MOST_NAMED", "Rollout", "digest_of_prompt"]

MOST_NAMED = 65_536
"""Prompts of which an open rollout remembers how many groups were named after them."""


class Rollout(CoreRollout):
    """Groups under way: an async iterator over their completions, as they finish; see ``CoreRollout``.

    ``named`` counts the groups that were named after each prompt; beyond ``MOST_NAMED`` prompts the least
    recently used ones are dropped.  Without ``keep``, the result holds only completions that were not read.

    ``begin`` and ``is_whole`` do the work of the methods of these names.  A completion is returned once the
    ``journal``, if there is one, has it.
    """

    def __init__(
        self,
        transcripts: Transcripts,
        clock: Clock,
        observers: ObserverHub,
        controller: ControllerCalls,
        most_requests: int | None = None,
        *,
        begin: Callable[[Sequence[PromptGroup]], Sequence[Sequence[WrittenResponse]]],
        is_whole: Callable[[PromptGroup], bool],
        tally: Tally,
        journal: Journal | None = None,
        keep: bool = True,
    ) -> None:
        super().__init__(transcripts, clock, observers, controller, most_requests)
        self._begin = begin
        self._is_whole = is_whole
        self.journal = journal
        self.named: OrderedDict[str, int] = OrderedDict()
        self._tally = tally
        self._completions: list[Completion] | None = [] if keep else None

    def add(self, groups: Iterable[PromptGroup]) -> None:
        """Roll out these groups as well; all of them, or none if it raises.

        Raises:
            PromptError: a group does not fit the model or the instances, or its id is that of another one
                under way.
            InputError: the journal has another group of its id, or one of other weights.
            OverloadError: there would be more than ``most_requests`` unfinished ones; see ``room``.
            SeerError: the rollout is closed.
            EngineError: no instance is alive.
        """
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

    def leave(self) -> None:
        """Close it and abort all unfinished requests.

        In a journal they stay unfinished: another process may go on with them.
        """
        self.journal = None
        super().leave()

    def leave_group(self, group_id: str) -> None:
        """Abort all unfinished requests of a group; in a journal they stay unfinished."""
        journal, self.journal = self.journal, None
        try:
            self.abort_group(group_id)
        finally:
            self.journal = journal

    @property
    def result(self) -> RolloutResult:
        """The finished responses so far, with a summary; only the unread ones if completions are not kept."""
        summary = self._tally.summary(self._transcripts.weight_version, self._observers.failed)
        return RolloutResult(list(self._ready if self._completions is None else self._completions), summary)

    async def kept(self) -> None:
        """Wait until the journal has what was written so far."""
        if self.journal is not None:
            await self.journal.synced()

    # Calls from the controller.

    def see(self, event: Event) -> None:
        """Count an event, other than the end of a chunk."""
        super().see(event)
        self._tally.see(event)

    def begin(self, groups: Sequence[PromptGroup]) -> Sequence[Sequence[WrittenResponse]]:
        """Refuse groups that do not fit; return what the journal has of the others."""
        return self._begin(groups)

    def is_whole(self, group: PromptGroup) -> bool:
        """Return whether the engines cannot go on with the responses of a group."""
        return self._is_whole(group)

    def chunk_ended(self, event: ChunkFinished, output: ChunkOutput) -> Callable[[], None] | None:
        """Give a chunk to the journal once the scheduler has taken it."""
        # A simulated engine's lazy tokens are not worth their making: the next run has them as soon.
        if self.journal is None or not isinstance(output.token_ids, list | Tokens):
            return None
        start, record = self._transcripts.last_chunk(event.request_id)
        return partial(
            self.journal.chunk,
            event.request_id,
            start,
            Tokens(output.token_ids),
            Logprobs(output.logprobs),
            output.stopped,
            record,
            output.top_logprobs,
            output.prompt_logprobs,
        )

    def extended(self, event: EnvironmentAnswered) -> None:
        """Give what extends a response to the journal."""
        if self.journal is not None:
            start, token_ids, turn = self._transcripts.last_extension(event.request_id)
            response, images = self._transcripts.held(event.request_id), None
            if isinstance(response.attachments, PlacedImages):
                images = response.attachments.since(start + len(response.group.prompt_token_ids))
            self.journal.answered(event.request_id, start, token_ids, turn, event.done, images)

    def take(self, closed: ClosedRequest) -> None:
        """Count a completion, keep it, and pass it on to the user."""
        if self.journal is not None and closed.completion.finish_reason == "aborted":
            self.journal.aborted(closed.completion.request_id)
        self._tally.add(closed.completion, closed.group_over, closed.resumed_tokens)
        if self._completions is not None:
            self._completions.append(closed.completion)
        super().take(closed)


def _named_after(group: PromptGroup) -> str | None:
    """Return the digest of a group's prompt if that is its id, or its id with a number; None if it is not."""
    digest = digest_of_prompt(group)
    return digest if group.id == digest or group.id.startswith(f"{digest}-") else None


def digest_of_prompt(group: PromptGroup) -> str:
    """Return 12 hexadecimal digits that depend on a prompt's tokens and images alone."""
    digest = hashlib.blake2b(msgspec.msgpack.encode(group.prompt_token_ids), digest_size=6)
    if isinstance(group.attachments, PlacedImages):
        digest.update(" ".join(group.attachments.digests).encode())
    return digest.hexdigest()
