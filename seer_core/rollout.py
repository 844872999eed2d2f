"""One rollout as its user holds it: completions as they finish, and in the end the result."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from seer_core.audience import Audience
from seer_core.errors import EngineError
from seer_core.model import Completion
from seer_core.ports import Clock
from seer_core.result import RolloutResult, Tally
from seer_core.transcripts import Transcripts

__all__ = ["Rollout"]


class Rollout:
    """One batch of groups under way: an async iterator over its completions, as they finish.

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
        give_up: Callable[[str], None],
        keep: bool = True,
    ) -> None:
        self.transcripts = transcripts
        self.tally = tally
        self._clock = clock
        self._audience = audience
        self._give_up = give_up
        self._ready: deque[Completion] = deque()
        self._completions: list[Completion] | None = [] if keep else None
        self._error: BaseException | None = None
        self._changed = asyncio.Event()

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
            if not self.transcripts:
                raise StopAsyncIteration
            self._changed.clear()
            if not await self._clock.advance(self._changed):
                raise EngineError(
                    f"{len(self.transcripts)} requests are unfinished and no engine will ever answer"
                )
        return self._ready.popleft()

    def unread(self) -> list[Completion]:
        """Take the completions not iterated over yet, without waiting: for one who must leave."""
        unread = list(self._ready)
        self._ready.clear()
        return unread

    async def wait(self) -> RolloutResult:
        """Return the whole result once everything has finished."""
        with suppress(StopAsyncIteration):
            while True:
                await self._next()
        return self.result

    @property
    def result(self) -> RolloutResult:
        """What has finished so far, with its summary; only what is unread if completions are not kept."""
        summary = self.tally.summary(self.transcripts.weight_version, self._audience.left_out)
        return RolloutResult(list(self._ready) if self._completions is None else self._completions, summary)

    @property
    def started_s(self) -> float:
        """When it began, on the run's clock."""
        return self.tally.started_s

    def abort_request(self, request_id: str) -> None:
        """Give up one request; it completes at once, with reason ``aborted`` and what it has."""
        if request_id in self.transcripts:
            self._give_up(request_id)

    async def abort(self) -> RolloutResult:
        """Give up everything unfinished and return the result."""
        for request_id in self.transcripts:
            self.abort_request(request_id)
        return await self.wait()

    # What the runtime tells.

    def add(self, completion: Completion) -> None:
        """Let the user have a completion."""
        self.tally.add(completion)
        if self._completions is not None:
            self._completions.append(completion)
        self._ready.append(completion)
        self._changed.set()

    def fail(self, error: BaseException) -> None:
        """End with an error, once the user has what has finished."""
        self._error = error
        self._changed.set()
