"""A rollout as its user holds it: groups in, completions out, and in the end the result."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Self

import attrs

from seer_core.errors import EngineError, OverloadError, SeerError
from seer_core.model import Completion, PromptGroup, WrittenResponse
from seer_core.model.arrays import Logprobs, PromptLogprobs, Tokens, TopLogprobs
from seer_core.model.events import (
    ChunkFailed,
    ChunkFinished,
    EnvironmentAnswered,
    EnvironmentFailed,
    Event,
    RequestsAborted,
    RolloutPaused,
    RolloutResumed,
)
from seer_core.ports.engine import ChunkOutput, Clock
from seer_core.runtime.fleet import END_CHUNKS_S
from seer_core.runtime.observers import ObserverHub
from seer_core.runtime.transcripts import ClosedRequest, Transcripts

__all__ = ["ControllerCalls", "CoreRollout", "MakeRollout"]


@attrs.frozen
class ControllerCalls:
    """The controller, as a rollout calls it."""

    submit: Callable[[Sequence[PromptGroup]], None]
    """Roll out these groups as well."""
    apply: Callable[[Event], None]
    """Apply an event; an error ends the rollout and is not raised."""
    chunks_ended: Callable[[float], Awaitable[None]]
    """Wait, at most so many seconds, until chunks that are to end early have."""
    closed: Callable[[CoreRollout], None]
    """Count a rollout, which takes no more groups."""


class CoreRollout:
    """Groups under way: an async iterator over their completions, as they finish.

    A batch is closed from the start.  An open rollout takes further groups until ``close``, also while none
    is under way; the iterator ends when the rollout is closed and all requests are over.  The controller
    keeps the transcripts, which a rollout only reads.  ``open``: it takes groups; ``submitted`` counts them,
    ``finished`` the requests that are over.  It began at ``started_s``, on the run's clock.

    The iterator raises ``EngineError`` when no instance is left, and at the end if all requests finished with
    reason ``error``.  The engines are served between two completions: work that takes longer than a moment,
    such as a reward that computes, belongs into a thread, ``await asyncio.to_thread(reward, completion)``.
    """

    def __init__(
        self,
        transcripts: Transcripts,
        clock: Clock,
        observers: ObserverHub,
        controller: ControllerCalls,
        most_requests: int | None = None,
    ) -> None:
        self.open = True
        self.started_s = clock.now()
        self.finished = 0
        self.submitted = 0
        self._transcripts = transcripts
        self._clock = clock
        self._observers = observers
        self._controller = controller
        self._most_requests = most_requests
        self._paused = False
        self._deadlines: dict[str, Callable[[], None]] = {}
        self._ready: deque[Completion] = deque()
        self._errors = 0
        self._first_failure = ""
        self._error: BaseException | None = None
        self._waiters: dict[asyncio.Event, None] = {}
        self._line: deque[object] = deque()

    # Groups in.

    def add(self, groups: Iterable[PromptGroup]) -> None:
        """Roll out these groups as well; all of them, or none if it raises.

        Raises:
            PromptError: its id is that of another one under way, or ``begin`` refuses a group.
            OverloadError: there would be more than ``most_requests`` unfinished ones; see ``room``.
            SeerError: the rollout is closed.
            EngineError: no instance is alive.
        """
        groups = list(groups)
        self._expect_room(sum(group.n for group in groups))
        if not groups:
            return
        self._controller.submit(groups)
        self.submitted += len(groups)
        for group in groups:
            if group.timeout_s is not None and self._transcripts.unfinished_of(group.id):
                when_s = self._clock.now() + group.timeout_s
                self._deadlines[group.id] = self._clock.call_at(when_s, partial(self.abort_group, group.id))
        self._wake()  # a virtual clock, which waiting readers move on, has something to do again

    async def room(self, requests: int = 1) -> None:
        """Wait until so many more requests may be added at once; raises as ``add`` if waiting is no use.

        Callers are served in the order of their calls.  A caller keeps its room by adding before it awaits
        anything else; ``add`` itself never waits.
        """
        me = object()
        self._line.append(me)
        try:
            while True:
                try:
                    self._expect_room(requests)
                except OverloadError:
                    if requests > (self._most_requests or 0):
                        raise
                else:
                    if self._line[0] is me:
                        return
                await self._change()
        finally:
            self._line.remove(me)
            self._wake()  # the next one in line

    def close(self) -> None:
        """Take no more groups: the iterator ends once everything is over.  Idempotent."""
        if self.open:
            self.open = False
            self._controller.closed(self)
            self._wake()

    def _expect_room(self, requests: int) -> None:
        if self._error is not None:
            raise self._error
        if not self.open:
            raise SeerError("this rollout is closed; begin another one, or add groups before you close it")
        most, unfinished = self._most_requests, len(self.unfinished)
        if most is not None and unfinished + requests > most:
            raise OverloadError(
                f"{requests} more requests, where {unfinished} are unfinished and {most} are taken at a time;"
                " await room(), or add fewer at once"
            )

    # Completions out.

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Completion:
        if self._ready:
            await asyncio.sleep(0)  # or engines' messages would wait while many are ready
        return await self._next()

    async def _next(self) -> Completion:
        while True:
            if self._ready:
                await self.kept()
            if self._ready:
                return self._ready.popleft()
            if self._error is not None:
                raise self._error
            if self.over:
                raise StopAsyncIteration
            await self._change()

    async def kept(self) -> None:
        """Wait, before a completion is returned, until its tokens are safe; here they are at once."""

    async def _change(self) -> None:
        """Wait until something has changed, and let time pass meanwhile."""
        changed = asyncio.Event()
        self._waiters[changed] = None  # a set would wake them by their addresses
        try:
            if await self._clock.advance(changed):
                return
            if self.unfinished and not self._paused:
                raise EngineError(
                    f"{len(self.unfinished)} requests are unfinished and no engine will ever answer"
                )
            await changed.wait()  # for more groups, or for close
        finally:
            del self._waiters[changed]

    def _wake(self) -> None:
        for waiter in self._waiters:
            waiter.set()

    def unread(self) -> list[Completion]:
        """Return the completions not iterated over yet, without waiting, and mark them as read."""
        unread = list(self._ready)
        self._ready.clear()
        return unread

    @property
    def over(self) -> bool:
        """Whether it is closed and everything has finished, or it has failed."""
        return self._error is not None or not (self.open or self.unfinished)

    @property
    def unfinished(self) -> Collection[str]:
        """The ids of the requests that are not over."""
        return self._transcripts.unfinished

    def written(self, request_id: str, start: int = 0) -> tuple[Tokens, Logprobs]:
        """Return copies of an unfinished request's tokens and log-probs, from ``start`` on, as they are now.

        They are those of whole chunks, and of the running chunk too if the group ``streams``.
        """
        return self._transcripts.written(request_id, start)

    def top_logprobs(self, request_id: str, start: int, end: int) -> TopLogprobs | None:
        """Return the most probable tokens at these places of an unfinished request's ``written`` tokens.

        None where its sampling does not ask for them.
        """
        return self._transcripts.top_logprobs(request_id, start, end)

    def prompt_logprobs(self, request_id: str) -> PromptLogprobs | None:
        """Return the log-probs of an unfinished request's prompt, once its first chunk has ended.

        None where its sampling does not ask for them.
        """
        return self._transcripts.prompt_logprobs(request_id)

    def written_tokens(self, request_id: str) -> int:
        """Return how many tokens an unfinished request has, without a copy of them."""
        return self._transcripts.written_tokens(request_id)

    # Pauses and aborts.

    async def pause(self, limit_s: float = END_CHUNKS_S, by: str = "") -> None:
        """Send no more chunks until ``resume``, and let those under way end with the tokens that they have.

        Returns once they have ended, or after ``limit_s`` seconds; then they go on, as on instances that
        cannot end a chunk early.  Responses are the same as without a pause.  Does not raise: an error of
        the rollout is raised by the iterator.  ``by``, here and below, names the person or program that asked
        for it, in the trace.
        """
        if self.over:
            return
        self._paused = True
        self._controller.apply(RolloutPaused(by))
        await self._controller.chunks_ended(limit_s)

    def resume(self, by: str = "") -> None:
        """Send chunks again after a ``pause``."""
        if not self.over:
            self._paused = False
            self._controller.apply(RolloutResumed(by))
            self._wake()  # a virtual clock has something to do again

    def abort_request(self, request_id: str) -> None:
        """Abort one request; it completes at once, with reason ``aborted`` and the tokens that it has."""
        self._abort([request_id] if request_id in self.unfinished else [])

    def abort_group(self, group_id: str, by: str = "") -> None:
        """Abort all unfinished requests of a group."""
        self._abort(self._transcripts.unfinished_of(group_id), by)

    def leave(self) -> None:
        """Close it and abort all unfinished requests."""
        self.close()
        self._abort(list(self.unfinished))

    def _abort(self, request_ids: Sequence[str], by: str = "") -> None:
        if request_ids and self._error is None:
            self._controller.apply(RequestsAborted(tuple(request_ids), by))

    # Calls from the controller.

    def begin(self, groups: Sequence[PromptGroup]) -> Sequence[Sequence[WrittenResponse]]:
        """Return what is written already of groups that are added: all responses of each, or none.

        A class made from this one may also refuse groups here, by a ``PromptError``.
        """
        return [()] * len(groups)

    def is_whole(self, group: PromptGroup) -> bool:
        """Return whether the responses of a group that is added are not divided."""
        return False

    def chunk_ended(self, event: ChunkFinished, output: ChunkOutput) -> Callable[[], None] | None:
        """Look at a chunk that has ended; return what is to be called once the scheduler has taken it."""
        return None

    def extended(self, event: EnvironmentAnswered) -> None:
        """Look at a response that has just been extended, before the scheduler takes that."""

    def see(self, event: Event) -> None:
        """Take note of an event, other than the end of a chunk."""
        match event:
            case ChunkFailed():
                self._first_failure = self._first_failure or f"instance {event.instance_id!r}: {event.reason}"
            case EnvironmentFailed():
                self._first_failure = self._first_failure or f"request {event.request_id!r}: {event.reason}"

    def take(self, closed: ClosedRequest) -> None:
        """Pass a completion on to the user; the last of a group ends that group's deadline."""
        completion = closed.completion
        if closed.group_over and completion.group_id in self._deadlines:
            self._deadlines.pop(completion.group_id)()
        self.finished += 1
        self._errors += completion.finish_reason == "error"
        self._ready.append(completion)
        self._wake()

    def fail_if_all_failed(self) -> None:
        """End with an error if all requests ended in one."""
        if self._errors == self.finished:
            self.fail(
                EngineError(
                    f"all {self.finished} requests ended in an error, the first on {self._first_failure};"
                    " mend that, then run again"
                )
            )

    def fail(self, error: BaseException) -> None:
        """End with an error, after the completions that are ready."""
        self._error, self.open = error, False
        for cancel in self._deadlines.values():
            cancel()
        self._wake()


MakeRollout = Callable[[Transcripts, Clock, ObserverHub, ControllerCalls, int | None], CoreRollout]
"""``CoreRollout``, or a class made from it."""
