"""A rollout as its user holds it: groups in, completions as they finish, and in the end the result."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol

from seer_core.arrays import Logprobs, Tokens
from seer_core.audience import Audience
from seer_core.errors import EngineError, OverloadError, SeerError
from seer_core.model import Completion, PromptGroup
from seer_core.ports import Clock
from seer_core.prompts import named_after
from seer_core.result import RolloutResult, Tally
from seer_core.transcripts import Closed, Transcripts

__all__ = ["MOST_NAMED", "Rollout", "Runner"]

MOST_NAMED = 65_536
"""Prompts of which an open rollout remembers how many groups were named after them."""


class Runner(Protocol):
    """Who does what the user of a rollout asks for."""

    def submit(self, groups: Sequence[PromptGroup]) -> None:
        """Roll out these groups as well."""
        ...

    def give_up(self, request_ids: Sequence[str]) -> None:
        """Abort these requests; each completes at once."""
        ...

    def closed(self) -> None:
        """No more groups will come."""
        ...


class Rollout:
    """Groups under way: an async iterator over their completions, as they finish.

    A batch is closed from the start.  One that is open takes further groups until ``close``, also while it
    has none under way; the iterator ends when it is closed and everything is over.  ``named`` counts the
    groups that were named after each prompt while it was open; of more than ``MOST_NAMED`` prompts those are
    forgotten that have not come again for longest.

    The iterator raises ``EngineError`` when no instance is left, and in the end if no request finished
    but with reason ``error``.  The engines are served between two completions: what takes longer than a
    moment, such as a reward that computes, belongs into a thread, ``await asyncio.to_thread(reward, it)``.
    """

    def __init__(
        self,
        transcripts: Transcripts,
        tally: Tally,
        clock: Clock,
        audience: Audience,
        runner: Runner,
        keep: bool = True,
        most_requests: int | None = None,
    ) -> None:
        self.transcripts = transcripts
        self.tally = tally
        self.open = True
        self.submitted = 0
        self.named: OrderedDict[str, int] = OrderedDict()
        self._clock = clock
        self._audience = audience
        self._runner = runner
        self._most_requests = most_requests
        self._deadlines: dict[str, Callable[[], None]] = {}
        self._ready: deque[Completion] = deque()
        self._completions: list[Completion] | None = [] if keep else None
        self._error: BaseException | None = None
        self._waiters: set[asyncio.Event] = set()
        self._line: deque[object] = deque()

    # Groups in.

    def add(self, groups: Iterable[PromptGroup]) -> None:
        """Roll out these groups as well; all of them, or none if it raises.

        Raises:
            PromptError: a group does not fit the model or the instances, or its id is that of another one
                under way.
            OverloadError: there would be more than ``most_requests`` unfinished ones; see ``room``.
            SeerError: the rollout is closed.
            EngineError: no instance is alive.
        """
        groups = list(groups)
        self._expect_room(sum(group.n for group in groups))
        if not groups:
            return
        self._runner.submit(groups)
        self.submitted += len(groups)
        for group in groups:
            if (name := named_after(group)) is not None:
                self.named[name] = self.named.pop(name, 0) + 1  # the last one now
                if len(self.named) > MOST_NAMED:
                    self.named.popitem(last=False)
            if group.timeout_s is not None:
                when_s = self._clock.now() + group.timeout_s
                self._deadlines[group.id] = self._clock.call_at(when_s, partial(self.abort_group, group.id))
        self._tell()  # whoever waits for completions moves a virtual clock, which has something to do again

    async def room(self, requests: int = 1) -> None:
        """Wait until so many more requests may be added at once; raises as ``add`` if waiting is no use.

        Whoever waits has its turn first come, first served, and keeps the room by adding before it awaits
        anything else.  ``add`` alone waits for nobody.
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
            self._tell()  # the next one in line

    def close(self) -> None:
        """Take no more groups: the iterator ends once everything is over.  Idempotent."""
        if self.open:
            self.open = False
            self._runner.closed()
            self._tell()

    def _expect_room(self, requests: int) -> None:
        if self._error is not None:
            raise self._error
        if not self.open:
            raise SeerError("this rollout is closed; begin another one, or add groups before you close it")
        most, unfinished = self._most_requests, len(self.transcripts)
        if most is not None and unfinished + requests > most:
            raise OverloadError(
                f"{requests} more requests, where {unfinished} are unfinished and {most} are taken at a time;"
                " await room(), or add fewer at once"
            )

    # Completions out.

    def __aiter__(self) -> Rollout:
        return self

    async def __anext__(self) -> Completion:
        if self._ready:
            await asyncio.sleep(0)  # or engines would not be heard while many are ready
        return await self._next()

    async def _next(self) -> Completion:
        while not self._ready:
            if self._error is not None:
                raise self._error
            if self.over:
                raise StopAsyncIteration
            await self._change()
        return self._ready.popleft()

    async def _change(self) -> None:
        """Wait until something has changed, and let time pass meanwhile."""
        changed = asyncio.Event()
        self._waiters.add(changed)
        try:
            if await self._clock.advance(changed):
                return
            if self.transcripts:
                raise EngineError(
                    f"{len(self.transcripts)} requests are unfinished and no engine will ever answer"
                )
            await changed.wait()  # somebody may still add groups, or close it
        finally:
            self._waiters.remove(changed)

    def _tell(self) -> None:
        for waiter in self._waiters:
            waiter.set()

    def unread(self) -> list[Completion]:
        """Take the completions not iterated over yet, without waiting: for one who must leave."""
        unread = list(self._ready)
        self._ready.clear()
        return unread

    async def wait(self) -> RolloutResult:
        """Return the whole result once it is closed and everything has finished."""
        with suppress(StopAsyncIteration):
            while True:
                await self._next()
        return self.result

    @property
    def over(self) -> bool:
        """Whether it is closed and everything has finished."""
        return not (self.open or self.transcripts)

    @property
    def result(self) -> RolloutResult:
        """What has finished so far, with its summary; only what is unread if completions are not kept."""
        summary = self.tally.summary(self.transcripts.weight_version, self._audience.left_out)
        return RolloutResult(list(self._ready if self._completions is None else self._completions), summary)

    @property
    def started_s(self) -> float:
        """When it began, on the run's clock."""
        return self.tally.started_s

    def written(self, request_id: str, start: int = 0) -> tuple[Tokens, Logprobs]:
        """Return tokens and log-probs of an unfinished request from ``start`` on, as they are now.

        They are those of whole chunks, and of the chunk under way too if its group ``streams``.
        """
        return self.transcripts.written(request_id, start)

    def written_tokens(self, request_id: str) -> int:
        """Return how many tokens an unfinished request has, without looking at them."""
        return self.transcripts.written_tokens(request_id)

    # Giving up.

    def abort_request(self, request_id: str) -> None:
        """Give up one request; it completes at once, with reason ``aborted`` and what it has."""
        self._abort([request_id] if request_id in self.transcripts else [])

    def abort_group(self, group_id: str) -> None:
        """Give up what is unfinished of a group, all at once."""
        self._abort(self.transcripts.unfinished(group_id))

    async def abort(self) -> RolloutResult:
        """Close it, give up everything unfinished and return the result."""
        self.close()
        self._abort(list(self.transcripts))
        return await self.wait()

    def _abort(self, request_ids: Sequence[str]) -> None:
        if request_ids and self._error is None:
            self._runner.give_up(request_ids)

    # What the runtime tells.

    def take(self, closed: Closed) -> None:
        """Let the user have a completion."""
        completion = closed.completion
        self.tally.add(completion, closed.group_over)
        if closed.group_over and completion.group_id in self._deadlines:
            self._deadlines.pop(completion.group_id)()
        if self._completions is not None:
            self._completions.append(completion)
        self._ready.append(completion)
        self._tell()

    def fail(self, error: BaseException) -> None:
        """End with an error, once the user has what has finished."""
        self._error, self.open = error, False
        for cancel in self._deadlines.values():
            cancel()
        self._tell()
