"""One open rollout for all clients, and the subscriptions of each to its responses."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, Protocol

import attrs
import msgspec
import structlog
from seer_session.images import names_images
from seer_session.journal import Journal
from seer_session.long_texts import LONG_TEXT, characters_of
from seer_session.rollouts import Rollout
from seer_session.runtime import Runtime

from seer_core.errors import EngineError, PromptError, SeerError, WeightVersionError
from seer_core.model import Completion, PromptGroup
from seer_core.model.arrays import Logprobs, Tokens
from seer_core.model.events import (
    Abort,
    ChunkFailed,
    ChunkFinished,
    Command,
    Complete,
    Dispatch,
    Event,
    InstanceLost,
    RolloutPaused,
    RolloutResumed,
)
from seer_core.ports.policy import Observer
from seer_server.direct import Canary, DirectWriter, aborted
from seer_server.trajectories import IDLE_S, AgentTurn, Trajectories
from seer_server.updates import UpdateQueue

__all__ = [
    "Arrival",
    "AsleepError",
    "BusyError",
    "BusyUpdatingError",
    "GoneError",
    "RolloutBroker",
    "Subscription",
]

log = structlog.get_logger("seer")

FINISHES = 64
"""Responses from whose ends the rate of completions is computed."""

UPDATING = "weights change, or instances fall asleep or wake; try again in a moment"
LONGEST_RETRY_S = 60


class AsleepError(SeerError):
    """The instances sleep: they have given their memory back.

    Remedy: wake them with ``POST /v1/wake``.
    """


class BusyError(SeerError):
    """Requests of a client are unfinished.

    Remedy: wait for them, abort them with ``POST /v1/abort``, or give a longer ``wait_s``.
    """


class GoneError(SeerError):
    """A request belongs to a group or a reservation that does not exist, or no longer.

    Remedy: reserve the group again.
    """


class BusyUpdatingError(SeerError):
    """The engines load weights, fall asleep or wake, and take no requests for a moment.

    Remedy: ask again after the seconds in the header ``Retry-After``.
    """


@attrs.frozen
class Trust:
    """How far the scheduler is trusted, where engines can write without it; by default wholly."""

    most_fallbacks: int = 0
    """Responses of a run that may be written without it."""
    stall_s: float = 0.0
    """After so long without a chunk, while responses wait, it has failed; 0 is never."""
    canary: int = 0
    """Responses of each version of the weights that are written again, whole on one server."""
    canary_stop: int = 0
    """After so many that differ it is not used any more; 0 is never."""
    renew: Callable[[Runtime, Sequence[Observer]], Awaitable[None]] | None = None
    """Has a runtime begin anew with fresh strategies after a failure."""


class Waiting(Protocol):
    """Responses that wait to be submitted, as those of a reservation do."""

    def abort(self, groups: Collection[str], requests: Collection[str]) -> int:
        """Abort those of these groups and requests; return their number."""
        ...

    def abort_all(self) -> int:
        """Abort all of them; return their number."""
        ...


@attrs.define(eq=False)
class Arrival:
    """A request that is not submitted yet: it is being read, or waits until engines are free."""

    name: str
    """The id by which its client may abort it."""
    n: int
    """How many responses are wanted for each prompt."""
    prompts: int = 1
    over: asyncio.Event = attrs.Factory(asyncio.Event)
    """Set once all of its prompts were aborted."""
    _aborted: set[int] = attrs.Factory(set)

    def abort(self, names: Collection[str]) -> int:
        """Abort prompts that are named, all without names; return the number of responses."""
        found = set(range(self.prompts) if not names else _named(self.name, self.prompts, names))
        new = found - self._aborted
        self._aborted |= found
        if len(self._aborted) == self.prompts:
            self.over.set()
        return len(new) * self.n

    def aborted(self, groups: Sequence[PromptGroup]) -> list[str]:
        """Return the ids of those of its groups that were aborted."""
        return [groups[number].id for number in sorted(self._aborted)]


@attrs.define(eq=False)
class Subscription:
    """Groups of one client: their ``updates`` are completions or an error and, if it ``streams``, pieces."""

    groups: Sequence[PromptGroup]
    streams: bool
    updates: UpdateQueue
    name: str = ""
    """The id of the request, by which its client may abort it."""
    direct: dict[str, asyncio.Task[Completion]] = attrs.Factory(dict)
    """Its responses that are being written without the scheduler."""

    @property
    def request_ids(self) -> list[str]:
        """Its requests, in the order of groups and indices."""
        return [f"{group.id}/{index}" for group in self.groups for index in range(group.n)]


class RolloutBroker(Observer):
    """Adds groups to an open rollout, and hands their responses, which it observes, to the subscriptions.

    ``reserved`` counts the rows of open reservations, ``instances_lost`` how often one was lost.

    As an observer it sees a response as soon as that is over.  When the response's turn to be read comes,
    another client may have submitted a group of the same name.
    """

    def __init__(
        self,
        make_runtime: Callable[[Sequence[Observer]], Runtime],
        most_requests: int | None = None,
        journal: Journal | None = None,
        observers: Sequence[Observer] = (),
        trajectory_idle_s: float = IDLE_S,
        trust: Trust | None = None,
    ) -> None:
        self.runtime = make_runtime([self, *observers])
        self.trust = trust or Trust()
        self.direct = DirectWriter(lambda: self.runtime, self.trust.most_fallbacks)
        self.canary = Canary(self.direct, self.trust.canary, self.trust.canary_stop)
        self._observers = [self, *observers]
        self._serving: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._running: dict[str, str] = {}
        """The instance of each request that has a chunk under way."""
        self._paused = False
        self._moved_s = 0.0
        """When a chunk was sent or ended for the last time."""
        self._left: dict[str, tuple[Tokens, Logprobs]] = {}
        """The tokens of responses that the scheduler has left unfinished."""
        self._direct: set[Subscription] = set()
        """Those that have responses which are being written without the scheduler."""
        self._going_on = 0
        """Responses that are being written so."""
        self._recovering = asyncio.Lock()
        self.trajectories = Trajectories(trajectory_idle_s, lambda name: self.runtime.forget(name))
        self.reserved = self.instances_lost = 0
        self._most_requests, self._journal = most_requests, journal
        self._rollout: Rollout | None = None
        self._opened = asyncio.Event()
        self._lock = asyncio.Lock()
        self._encoding = asyncio.Lock()
        self._drained: asyncio.Event | None = None
        self._released = asyncio.Event()
        self._subscriptions: dict[str, Subscription] = {}
        self._arrivals: set[Arrival] = set()
        self.waiting: list[Waiting] = []
        self._finishes: deque[float] = deque(maxlen=FINISHES)
        self._failure: SeerError | None = None

    def require_rollout(self) -> Rollout:
        """Return the open rollout.

        Raises:
            AsleepError, BusyUpdatingError: there is none for now.
            SeerError: it has failed, or has not begun.
        """
        self.require_working()
        self.require_awake()
        if self.changing:
            raise BusyUpdatingError(UPDATING)
        if self._rollout is None:
            raise EngineError("the server is not ready; try again")
        return self._rollout

    @property
    def unfinished(self) -> int:
        """Responses that are not over."""
        return 0 if self._rollout is None else len(self._rollout.unfinished)

    @property
    def changing(self) -> bool:
        """Whether the engines are in exclusive use, or are about to be: no requests are taken."""
        return self._lock.locked() and (self._rollout is None or self._drained is not None)

    def require_working(self) -> None:
        """Raise the SeerError with which the engines have failed, if they have."""
        if self._failure is not None:
            raise self._failure
        if self._rollout is not None or self._lock.locked():
            self.runtime.require_alive()

    def require_awake(self) -> None:
        """Raise AsleepError if the instances sleep."""
        if self.runtime.asleep:
            raise AsleepError("the instances are asleep; wake them first: POST /v1/wake")

    def require_version(self, version: int | None) -> None:
        """Raise WeightVersionError unless these weights are loaded, if it matters."""
        loaded = self.runtime.weight_version
        if version not in (None, loaded):
            raise WeightVersionError(
                f"the request is for weight version {version}, and {loaded} is loaded; update the weights, or"
                f" ask for version {loaded}"
            )

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Keep a rollout going as long as this is entered."""
        self._serving = asyncio.create_task(self._serve())
        if self.trust.stall_s:
            self._watching = asyncio.create_task(self._watch(self.trust.stall_s))
        try:
            yield
        finally:
            self.canary.close()
            for task in (self._watching, self._serving):
                if task is not None:
                    task.cancel()
                    with suppress(asyncio.CancelledError):
                        await task

    async def _serve(self) -> None:
        """Keep a rollout going, one after the other, until one has failed, or this is cancelled."""
        try:
            self._open()
            while True:
                await self._opened.wait()
                self._opened.clear()
                if self._rollout is not None:
                    await self._read(self._rollout)
        except Exception as error:
            log.error("serving_failed", error=str(error))
            failure = error if isinstance(error, SeerError) else EngineError(f"the rollout failed: {error}")
            self._fail(failure)
        finally:
            if self._failure is None and self._rollout is not None:
                with suppress(SeerError):
                    await self._rollout.abort()
            self.trajectories.close()

    def _fail(self, failure: SeerError) -> None:
        """End all subscriptions by an error, and keep what their responses have."""
        self._failure = failure
        rollout = self._rollout
        if rollout is not None and self.direct.able:
            for name in list(rollout.unfinished):
                with suppress(SeerError, KeyError):
                    self._left[name] = rollout.written(name)
        if self._drained is not None:
            self._drained.set()
        for subscription in set(self._subscriptions.values()):
            subscription.updates.fail(failure)

    # Without the scheduler.

    @property
    def without_scheduler(self) -> bool:
        """Whether responses are written by servers directly: the scheduler has failed, or is not trusted."""
        failed = self._failure is not None or self.runtime.strategies_failed
        return (failed or self.canary.stopped) and self.direct.able

    async def detached(self, records: Sequence[Mapping[str, Any]], streams: bool) -> Subscription:
        """Return a subscription to responses that the scheduler will not see: they fail, and ``go_on``."""
        groups = await asyncio.to_thread(self.runtime.groups, records, iteration=0, fitting=True)
        self._require_steady()
        subscription = Subscription(groups, streams, UpdateQueue(lambda *_: (Tokens(), Logprobs())))
        failure = self._failure or self.canary.failure
        subscription.updates.fail(failure)
        return subscription

    async def go_on(
        self, subscription: Subscription, found: Mapping[str, Completion], error: SeerError
    ) -> dict[str, Completion]:
        """Return the responses that are not ``found``, written without the scheduler.

        Raises:
            SeerError: ``error``, where they cannot be, or weights are about to change.
        """
        if not self.without_scheduler:
            raise error
        self._require_steady()
        missing = len(subscription.request_ids) - len(found)
        self._going_on += missing
        self._direct.add(subscription)
        empty, names = (Tokens(), Logprobs()), subscription.request_ids
        left = {name: self._left[name] for name in names if name in self._left}
        try:
            return await self.direct.go_on(
                subscription.groups,
                found,
                lambda name: left.get(name, empty),
                str(error),
                subscription.direct,
            )
        finally:
            self._direct.discard(subscription)
            self._going_on -= missing
            self._note_drained()

    def _require_steady(self) -> None:
        """Raise SeerError if instances sleep or weights are about to change; a failure keeps both off."""
        if self._failure is None:
            self.require_rollout()

    async def recover(self) -> None:
        """Try again with a scheduler that begins anew, once the responses of before are over."""
        renew = self.trust.renew
        if renew is None or self._failure is None or self._going_on or not self.runtime.alive:
            return
        async with self._recovering:
            if self._failure is None or self._going_on:
                return
            await renew(self.runtime, self._observers)
            log.info("scheduler_begins_anew", after=str(self._failure))
            self._failure, self._rollout = None, None
            self._left.clear()
            self._running.clear()
            self._subscriptions.clear()
            self._opened.clear()
            self._serving = asyncio.create_task(self._serve())
            while self._rollout is None and not self._serving.done():
                await asyncio.sleep(0)

    async def _watch(self, stall_s: float) -> None:
        """Fail where responses wait, and no chunk is sent or runs, for so long."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(stall_s / 4)
            rollout = self._rollout
            if self._failure is not None or not self.unfinished or self._running:
                self._moved_s = loop.time()
            if rollout is None or self._paused or self.runtime.asleep or not self.runtime.alive:
                self._moved_s = loop.time()
                continue
            if loop.time() - self._moved_s > stall_s:
                log.error("scheduler_stalls", unfinished=self.unfinished, seconds=stall_s)
                self._fail(
                    EngineError(f"the scheduler has sent no chunk for {stall_s:g} s while responses wait")
                )
                if self._serving is not None:
                    self._serving.cancel()
                with suppress(SeerError, TimeoutError):
                    async with asyncio.timeout(stall_s):
                        await rollout.abort()

    async def _read(self, rollout: Rollout) -> None:
        try:
            async for _ in rollout:
                pass
        except SeerError:
            if self.runtime.strategies_failed:
                raise
            # All its responses ended with an error, because of bad weights for example; the engines go on.

    @asynccontextmanager
    async def exclusive(self, wait_s: float = 0.0) -> AsyncIterator[Runtime]:
        """End the rollout, yield the runtime, and open the next rollout if the instances are awake then.

        Requests are refused meanwhile, and while this waits for unfinished responses.  While it waits for
        reservations to be closed, requests are taken, or the reserved rows would never be over.

        Raises:
            BusyError: rows are unfinished or reserved, also after ``wait_s`` seconds.
            BusyUpdatingError: the runtime is in exclusive use already, also after ``wait_s`` seconds.
            SeerError: the rollout has failed.
        """
        async with self._acquire(wait_s):
            self.require_working()
            end_s = asyncio.get_running_loop().time() + wait_s
            await self._wait_until_released(wait_s)
            self.require_working()
            await self._drain(end_s - asyncio.get_running_loop().time())
            await self.canary.over(end_s - asyncio.get_running_loop().time())
            rollout, self._rollout = self._rollout, None
            if rollout is not None:
                rollout.close()
            try:
                yield self.runtime
            finally:
                self._open()

    @asynccontextmanager
    async def _acquire(self, wait_s: float) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(wait_s if self._lock.locked() else None):
                await self._lock.acquire()
        except TimeoutError:
            raise BusyUpdatingError(UPDATING) from None
        try:
            yield
        finally:
            self._lock.release()

    async def _wait_until_released(self, wait_s: float) -> None:
        try:
            async with asyncio.timeout(wait_s):
                while self.reserved:
                    await self._released.wait()
        except TimeoutError:
            raise BusyError(
                f"{self.reserved} rows are reserved; close their reservation first, or let this wait: wait_s"
            ) from None

    async def _drain(self, wait_s: float) -> None:
        if not self.unfinished and not self._going_on:
            return
        self._drained = asyncio.Event()
        try:
            async with asyncio.timeout(wait_s):  # wait_for may swallow a cancellation in Python 3.11
                await self._drained.wait()
        except TimeoutError:
            raise BusyError(
                f"{self.unfinished + self._going_on} responses are unfinished; wait for them, give them up,"
                " or let this wait: wait_s"
            ) from None
        finally:
            self._drained = None
        self.require_working()

    def _open(self) -> None:
        if not self.runtime.asleep:
            self._rollout = self.runtime.open(
                keep=False, most_requests=self._most_requests, journal=self._journal
            )
            self._opened.set()

    async def read_so_far(self) -> None:
        """Wait until requests that have come before this call are read, and so are submitted."""
        async with self._encoding:
            pass

    async def submit_text(
        self,
        records: Sequence[Mapping[str, Any]],
        streams: bool,
        iteration: int = 0,
        *,
        fitting: bool = False,
        turn: AgentTurn | None = None,
        weight_version: int | None = None,
        arrival: Arrival | None = None,
    ) -> Subscription:
        """As ``submit``; long text and images are read beside the event loop, one request at a time.

        Parts of the ``arrival`` that are aborted by then are over at once.

        Raises:
            WeightVersionError: another version than ``weight_version`` is loaded once they are read.
        """
        self.require_rollout()
        self.require_capacity(len(records))
        groups = await self.read(records, iteration, fitting=fitting)
        self.require_version(weight_version)
        if arrival is not None and arrival.over.is_set():
            return self._over(groups, streams)
        subscription = self.submit(groups, streams, turn)
        if arrival is not None:
            self.abort(arrival.aborted(groups), [])
        return subscription

    @contextmanager
    def arriving(self, name: str, n: int) -> Iterator[Arrival]:
        """Have abort routes find a request of this name that wants ``n`` responses for each prompt."""
        arrival = Arrival(name, n)
        self._arrivals.add(arrival)
        try:
            yield arrival
        finally:
            self._arrivals.discard(arrival)

    async def aborted(self, records: Sequence[Mapping[str, Any]], streams: bool) -> Subscription:
        """Return a subscription to responses that were aborted before they had a token."""
        return self._over(await self.read(records, fitting=True), streams)

    def _over(self, groups: Sequence[PromptGroup], streams: bool) -> Subscription:
        subscription = Subscription(groups, streams, UpdateQueue(lambda *_: (Tokens(), Logprobs())))
        for group in groups:
            for index in range(group.n):
                subscription.updates.complete(aborted(self.runtime, group, index))
        return subscription

    async def read(
        self, records: Sequence[Mapping[str, Any]], iteration: int = 0, *, fitting: bool = False
    ) -> list[PromptGroup]:
        """Return the groups of records, ``fitting`` as for ``Runtime.groups``.

        Long text and images are read beside the event loop, one request at a time.

        Raises:
            PromptError: one cannot be rolled out.
        """
        if _is_soon_read(records):
            return self.runtime.groups(records, iteration=iteration, fitting=fitting)
        async with self._encoding:
            return await asyncio.to_thread(self.runtime.groups, records, iteration=iteration, fitting=fitting)

    def submit(
        self, groups: Sequence[PromptGroup], streams: bool, turn: AgentTurn | None = None
    ) -> Subscription:
        """Add groups to the rollout; they may be a ``turn``.

        Raises as ``Rollout.add``, but a ``PromptError`` if no room will do.
        """
        rollout = self.require_rollout()
        if self.canary.stopped and not self.without_scheduler:
            raise self.canary.failure
        marked = self.trajectories.mark(groups, turn)
        groups = [msgspec.structs.replace(group, streams=streams) for group in marked]
        wanted = sum(group.n for group in groups)
        self.require_capacity(wanted)
        asking = any(group.sampling.prompt_logprobs is not None for group in groups)
        of_prompt = rollout.prompt_logprobs if asking else None
        updates = UpdateQueue(rollout.written, rollout.top_logprobs, of_prompt)
        subscription = Subscription(groups, streams, updates)
        others = {group.id: self._subscriptions.get(group.id) for group in groups}
        # Beforehand: what a journal has is over at once.
        self._subscriptions.update((group.id, subscription) for group in groups)
        begun = self.trajectories.begin(groups, turn)
        try:
            rollout.add(groups)
        except BaseException:
            self.trajectories.refused(begun)
            self._subscriptions.update((name, each) for name, each in others.items() if each is not None)
            for name, each in others.items():
                if each is None:
                    del self._subscriptions[name]
            raise
        return subscription

    def reserve(self, rows: int) -> None:
        """Count rows as reserved."""
        self.reserved += rows
        self._released.clear()

    def release(self, rows: int) -> None:
        """Count rows as reserved no longer; the last one lets ``exclusive`` go on."""
        self.reserved -= rows
        if not self.reserved:
            self._released.set()

    def require_capacity(self, requests: int) -> None:
        """Raise PromptError if there is never room for so many."""
        most = self._most_requests
        if most is not None and requests > most:
            raise PromptError(
                f"{requests} responses at once, where {most} are taken at a time; ask for fewer"
            )

    def unsubscribe(self, subscription: Subscription) -> None:
        """Drop a subscription, and abort its unfinished responses.

        A group of it that is over may belong to another subscription by now.
        """
        for group in subscription.groups:
            if self._subscriptions.get(group.id) is subscription:
                del self._subscriptions[group.id]
                if self._failure is None and self._rollout is not None:
                    self._rollout.leave_group(group.id)  # its client may ask again

    def abort_request(self, subscription: Subscription, request_id: str) -> None:
        """Abort one response of a subscription, unless the group belongs to another subscription by now."""
        if self._subscriptions.get(request_id.rpartition("/")[0]) is subscription:
            self.abort([], [request_id])

    def abort(self, groups: Iterable[str], requests: Iterable[str]) -> int:
        """Abort groups and requests as far as they are unfinished; return the number of responses."""
        groups, requests = list(groups), list(requests)
        number = self._abort_direct(groups, requests)
        number += sum(each.abort(groups, requests) for each in self.waiting)
        rollout, before = self._rollout, self.unfinished
        if rollout is None or self._failure is not None:
            return number
        for group_id in groups:
            rollout.abort_group(group_id)
        for request_id in requests:
            rollout.abort_request(request_id)
        return number + before - self.unfinished

    def _abort_direct(self, groups: Collection[str], requests: Collection[str]) -> int:
        """Abort responses that are being written without the scheduler; return their number."""
        found = [
            task
            for each in self._direct
            for name, task in each.direct.items()
            if name in requests or name.rpartition("/")[0] in groups
        ]
        return sum([task.cancel() for task in found if not task.cancelling()])

    def abort_all(self) -> int:
        """Abort all that is unfinished; return the number of responses."""
        under_way = () if self._rollout is None else self._rollout.unfinished
        return self.abort([], [*under_way, *(name for each in self._direct for name in each.direct)])

    def abort_named(self, names: Collection[str]) -> int:
        """Abort requests by the ids that their clients have of them, all without names.

        Also those that are not submitted yet.  Return the number of responses.
        """
        waiting = sum(each.abort(names) for each in self._arrivals)
        if not names:
            return waiting + sum(each.abort_all() for each in self.waiting) + self.abort_all()
        groups = [
            each.groups[number].id
            for each in {*self._subscriptions.values(), *self._direct}
            for number in _named(each.name, len(each.groups), names)
        ]
        return waiting + self.abort(groups, [])

    def written(self, request_ids: Iterable[str]) -> int:
        """Return how many tokens the unfinished ones of these requests have, up to their last chunks."""
        rollout = self._rollout
        if rollout is None:
            return 0
        return sum(rollout.written_tokens(name) for name in request_ids if name in rollout.unfinished)

    def retry_s(self, requests: int) -> int:
        """Return after how many seconds so many more requests may have room, at the present rate."""
        times = self._finishes
        if len(times) < 2 or times[-1] <= times[0]:
            return 1
        rate = (len(times) - 1) / (times[-1] - times[0])
        return min(max(1, math.ceil(requests / rate)), LONGEST_RETRY_S)

    def observe(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        """Notify a client that streams: a chunk of a response has ended.  Count lost instances."""
        if type(event) is ChunkFinished:
            self._notify(event.request_id)
        self.instances_lost += type(event) is InstanceLost
        if self.trust.stall_s:
            self._note_chunks(event, commands)

    def _note_chunks(self, event: Event, commands: Sequence[Command]) -> None:
        match event:
            case RolloutPaused() | RolloutResumed():
                self._paused = isinstance(event, RolloutPaused)
            case ChunkFinished() | ChunkFailed():
                self._running.pop(event.request_id, None)
            case InstanceLost():
                lost = [name for name, where in self._running.items() if where == event.instance_id]
                for name in lost:
                    del self._running[name]
        for command in commands:
            if type(command) is Dispatch:
                self._running[command.request_id] = command.instance_id
                self._moved_s = asyncio.get_running_loop().time()
            elif type(command) is Abort or type(command) is Complete:
                self._running.pop(command.request_id, None)

    def streamed(self, now: float, request_id: str) -> None:
        """Notify a client that streams: a running chunk has written more."""
        self._notify(request_id)

    def _notify(self, request_id: str) -> None:
        subscription = self._subscriptions.get(request_id.rpartition("/")[0])
        if subscription is not None and subscription.streams:
            subscription.updates.notify(request_id)

    def _note_drained(self) -> None:
        if self._drained is not None and not self.unfinished and not self._going_on:
            self._drained.set()

    def completed(self, now: float, completion: Completion) -> None:
        """Put a response into the updates of its subscription."""
        self._finishes.append(now)
        self.trajectories.completed(completion)
        if self.canary.each_step and (of := self._subscriptions.get(completion.group_id)) is not None:
            group = next(each for each in of.groups if each.id == completion.group_id)
            self.canary.look(group, completion)
        self._note_drained()
        subscription = self._subscriptions.get(completion.group_id)
        if subscription is not None:
            subscription.updates.complete(completion)


def _named(name: str, prompts: int, names: Collection[str]) -> Iterable[int]:
    """Return which prompts of a request are named: all by its id, one by the id that it has at vLLM's."""
    if name in names:
        return range(prompts)
    return [number for number in range(prompts) if f"{name}-{number}" in names]


def _is_soon_read(records: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the prompts of records are little text, and no images."""
    if any(map(names_images, records)):
        return False
    names = ("prompt", "messages", "chat_template_kwargs")
    return sum(characters_of(*map(record.get, names)) for record in records) < LONG_TEXT
