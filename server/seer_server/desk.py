"""The desk: one open rollout for all clients, and who waits for what of it."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import attrs
import msgspec
import structlog

from seer_core.errors import EngineError, PromptError, SeerError
from seer_core.events import ChunkFinished, Command, Event
from seer_core.model import Completion, Piece, PromptGroup
from seer_core.policy import Observer
from seer_core.rollout import Rollout
from seer_core.runtime import Runtime
from seer_server.news import News

__all__ = ["AsleepError", "BusyError", "Desk", "GoneError", "LentError", "Ticket"]

log = structlog.get_logger("seer")

FINISHES = 64
"""Responses by which the pace is told."""

LENT = "weights change, or instances fall asleep or wake; try again in a moment"
LONGEST_RETRY_S = 60


class AsleepError(SeerError):
    """The instances have given their memory to somebody else."""


class BusyError(SeerError):
    """Somebody's requests are unfinished."""


class GoneError(SeerError):
    """What a request belongs to is not there, or no longer."""


class LentError(SeerError):
    """The engines do something else for a while."""


@attrs.frozen(eq=False)
class Ticket:
    """What one client waits for: ``news`` are completions or an error and, if it ``streams``, pieces."""

    groups: Sequence[PromptGroup]
    streams: bool
    news: News


class Desk:
    """Adds what clients ask for to an open rollout, and hands each what is his as its observer.

    ``announced`` counts rows that somebody has announced and not closed.

    It sees a response when it is over, and not when its turn to be read comes: by then another client may
    have asked for a group of the same name.
    """

    def __init__(
        self, make_runtime: Callable[[Sequence[Observer]], Runtime], most_requests: int | None = None
    ) -> None:
        self.runtime = make_runtime([self])
        self.announced = 0
        self._most_requests = most_requests
        self._rollout: Rollout | None = None
        self._begun = asyncio.Event()
        self._lending = asyncio.Lock()
        self._quiet: asyncio.Event | None = None
        self._closed = asyncio.Event()
        self._tickets: dict[str, Ticket] = {}
        self._finishes: deque[float] = deque(maxlen=FINISHES)
        self._failure: SeerError | None = None

    @property
    def rollout(self) -> Rollout:
        """The open rollout.

        Raises:
            AsleepError, LentError: there is none for now.
            SeerError: it has failed, or has not begun.
        """
        self.expect_working()
        if self.runtime.fleet.asleep:
            raise AsleepError("the instances are asleep; wake them first: POST /v1/wake")
        if self.changing:
            raise LentError(LENT)
        if self._rollout is None:
            raise EngineError("the server is not ready; try again")
        return self._rollout

    @property
    def unfinished(self) -> int:
        """Responses that are not over."""
        return 0 if self._rollout is None else len(self._rollout.transcripts)

    @property
    def changing(self) -> bool:
        """Whether the engines are lent, or are about to be: nothing new is taken."""
        return self._lending.locked() and (self._rollout is None or self._quiet is not None)

    def expect_working(self) -> None:
        """Raise the SeerError with which the engines have failed, if they have."""
        if self._failure is not None:
            raise self._failure
        if self._rollout is not None or self._lending.locked():
            self.runtime.fleet.expect_living()

    async def serve(self) -> None:
        """Keep a rollout going, one after the other, until one has failed, or this is cancelled."""
        try:
            self._begin()
            while True:
                await self._begun.wait()
                self._begun.clear()
                if self._rollout is not None:
                    await self._read(self._rollout)
        except Exception as error:
            log.error("serving_failed", error=str(error))
            failure = error if isinstance(error, SeerError) else EngineError(f"the rollout failed: {error}")
            self._failure = failure
            if self._quiet is not None:
                self._quiet.set()
            for ticket in set(self._tickets.values()):
                ticket.news.failed(failure)
        finally:
            if self._failure is None and self._rollout is not None:
                with suppress(SeerError):
                    await self._rollout.abort()

    async def _read(self, rollout: Rollout) -> None:
        try:
            async for _ in rollout:
                pass
        except SeerError:
            if self.runtime.loop.spoilt:
                raise
            # All its responses ended with an error, by bad weights say; the engines go on.

    @asynccontextmanager
    async def idle(self, wait_s: float = 0.0) -> AsyncIterator[Runtime]:
        """End the rollout, lend the runtime, and begin the next one if the instances are awake then.

        Nothing new is taken meanwhile, nor while this waits for what is unfinished.  While it waits for
        announcements to be closed, all goes on, or their rows would never be over.

        Raises:
            BusyError: somebody's requests are unfinished or announced, also after ``wait_s`` seconds.
            LentError: it is lent to somebody else, also after ``wait_s`` seconds.
            SeerError: the rollout has failed.
        """
        async with self._turn(wait_s):
            self.expect_working()
            end_s = asyncio.get_running_loop().time() + wait_s
            await self._wait_until_closed(wait_s)
            self.expect_working()
            await self._wait_until_quiet(end_s - asyncio.get_running_loop().time())
            rollout, self._rollout = self._rollout, None
            if rollout is not None:
                rollout.close()
            try:
                yield self.runtime
            finally:
                self._begin()

    @asynccontextmanager
    async def _turn(self, wait_s: float) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(wait_s if self._lending.locked() else None):
                await self._lending.acquire()
        except TimeoutError:
            raise LentError(LENT) from None
        try:
            yield
        finally:
            self._lending.release()

    async def _wait_until_closed(self, wait_s: float) -> None:
        try:
            async with asyncio.timeout(wait_s):
                while self.announced:
                    await self._closed.wait()
        except TimeoutError:
            raise BusyError(
                f"{self.announced} rows are announced; close their announcement first, or let this wait:"
                " wait_s"
            ) from None

    async def _wait_until_quiet(self, wait_s: float) -> None:
        if not self.unfinished:
            return
        self._quiet = asyncio.Event()
        try:
            async with asyncio.timeout(wait_s):  # wait_for may swallow a cancellation in Python 3.11
                await self._quiet.wait()
        except TimeoutError:
            raise BusyError(
                f"{self.unfinished} responses are unfinished; wait for them, give them up, or let this wait:"
                " wait_s"
            ) from None
        finally:
            self._quiet = None
        self.expect_working()

    def _begin(self) -> None:
        if not self.runtime.fleet.asleep:
            self._rollout = self.runtime.open(keep=False, most_requests=self._most_requests)
            self._begun.set()

    def ask(
        self,
        records: Sequence[Mapping[str, Any]],
        streams: bool,
        iteration: int = 0,
        *,
        fitting: bool = False,
    ) -> Ticket:
        """Add prompts to the rollout, ``fitting`` as for ``Runtime.groups``.

        Raises as ``Rollout.add``, but a ``PromptError`` if no room will do.
        """
        rollout = self.rollout
        self.expect_possible(len(records))
        groups = [
            msgspec.structs.replace(group, streams=streams)
            for group in self.runtime.groups(records, iteration=iteration, fitting=fitting)
        ]
        wanted = sum(group.n for group in groups)
        self.expect_possible(wanted)
        ticket = Ticket(groups, streams, News(rollout.written))
        rollout.add(groups)
        self._tickets.update((group.id, ticket) for group in groups)
        return ticket

    def announce(self, rows: int) -> None:
        """Count rows that somebody announces."""
        self.announced += rows
        self._closed.clear()

    def close(self, rows: int) -> None:
        """Count rows as announced no longer."""
        self.announced -= rows
        if not self.announced:
            self._closed.set()

    def expect_possible(self, requests: int) -> None:
        """Raise PromptError if there is never room for so many."""
        most = self._most_requests
        if most is not None and requests > most:
            raise PromptError(
                f"{requests} responses at once, where {most} are taken at a time; ask for fewer"
            )

    def leave(self, ticket: Ticket) -> None:
        """Forget a ticket, and give up what of it is unfinished.

        A group of it that is over may be another's by now.
        """
        for group in ticket.groups:
            if self._tickets.get(group.id) is ticket:
                del self._tickets[group.id]
                if self._failure is None and self._rollout is not None:
                    self._rollout.abort_group(group.id)

    def give_up(self, ticket: Ticket, request_id: str) -> None:
        """Give up one response of a ticket; a request of that name may be another's by now."""
        if self._tickets.get(request_id.rpartition("/")[0]) is ticket:
            self.abort([], [request_id])

    def abort(self, groups: Iterable[str], requests: Iterable[str]) -> int:
        """Give up groups and requests as far as they are unfinished; return how many responses that were."""
        rollout, before = self._rollout, self.unfinished
        if rollout is None or self._failure is not None:
            return 0
        for group_id in groups:
            rollout.abort_group(group_id)
        for request_id in requests:
            rollout.abort_request(request_id)
        return before - self.unfinished

    def written(self, request_ids: Iterable[str]) -> int:
        """Return how many tokens the unfinished ones of these requests have, up to their last chunks."""
        rollout = self._rollout
        if rollout is None:
            return 0
        return sum(rollout.written_tokens(name) for name in request_ids if name in rollout.transcripts)

    def retry_s(self, requests: int) -> int:
        """Return after how many seconds so many more requests may have room, at the present pace."""
        times = self._finishes
        if len(times) < 2 or times[-1] <= times[0]:
            return 1
        pace = (len(times) - 1) / (times[-1] - times[0])
        return min(max(1, math.ceil(requests / pace)), LONGEST_RETRY_S)

    def observe(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        """Tell a client who streams that a chunk of a response has ended."""
        if type(event) is ChunkFinished:
            self._went_on(event.request_id)

    def grew(self, now: float, piece: Piece) -> None:
        """Tell a client who streams that a running chunk has written more."""
        self._went_on(piece.request_id)

    def _went_on(self, request_id: str) -> None:
        ticket = self._tickets.get(request_id.rpartition("/")[0])
        if ticket is not None and ticket.streams:
            ticket.news.went_on(request_id)

    def completed(self, now: float, completion: Completion) -> None:
        """Hand out a response."""
        self._finishes.append(now)
        if self._quiet is not None and not self.unfinished:
            self._quiet.set()
        ticket = self._tickets.get(completion.group_id)
        if ticket is not None:
            ticket.news.ended(completion)
