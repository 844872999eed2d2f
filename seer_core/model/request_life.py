"""The lives of requests, read from a run's events: their chunks, and for what they waited in between."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Literal

import attrs
import msgspec

from seer_core.model.chunk_runs import ChunkFollower, ChunkRun
from seer_core.model.events import (
    Command,
    Complete,
    Dispatch,
    Event,
    GroupSpec,
    GroupsSubmitted,
    InstanceReported,
    RolloutPaused,
    RolloutResumed,
)

__all__ = ["Cause", "LifeReader", "RequestLife", "Wait"]

Cause = Literal["slots", "kv", "turn", "paused", "instances"]
"""What a waiting request lacked: a free slot on any instance; room for its KV on an instance with a free
slot; nothing but its turn, for other requests were preferred or its instance was another one; a rollout that
is not paused; any instance at all."""


class Wait(msgspec.Struct, frozen=True, tag=True):
    """A time in which no chunk of the request ran."""

    begin_s: float
    """When it began, in seconds on the run's clock."""
    end_s: float
    """When the next chunk was sent, or the trace ended."""
    causes_s: dict[Cause, float]
    """How long it lacked what."""


class RequestLife(msgspec.Struct):
    """One request, as a trace has it."""

    request_id: str
    """The request, as ``GROUP/INDEX``."""
    group: GroupSpec
    """Its group."""
    submitted_s: float
    """When the group was submitted, in seconds on the run's clock."""
    parts: list[Wait | ChunkRun]
    """Waits and chunks in order."""
    finished_s: float | None = None
    """When the response was complete."""
    finish_reason: str | None = None
    """Why it was over."""
    before_it: int = 0
    """How many responses of its group were complete before it."""

    @property
    def chunks(self) -> list[ChunkRun]:
        """Its chunks in order."""
        return [part for part in self.parts if isinstance(part, ChunkRun)]

    @property
    def tokens(self) -> int:
        """The tokens that its chunks brought."""
        return sum(each.result.tokens for each in self.chunks if each.result is not None)

    def waited_s(self) -> dict[Cause, float]:
        """Return how long it lacked what, in all."""
        found: dict[Cause, float] = {}
        for part in self.parts:
            if isinstance(part, Wait):
                for cause, seconds in part.causes_s.items():
                    found[cause] = found.get(cause, 0.0) + seconds
        return found


@attrs.define(eq=False)
class _LackLog:
    """The lack of waiting requests over time; a number is the KV that an instance with a free slot has."""

    times_s: list[float] = attrs.Factory(list)
    lacks: list[Cause | int] = attrs.Factory(list)

    def note(self, now: float, lack: Cause | int) -> None:
        """Note what is lacking from now on."""
        if not self.lacks or self.lacks[-1] != lack:
            self.times_s.append(now)
            self.lacks.append(lack)

    def forget(self, before_s: float) -> None:
        """Drop what no wait that began at ``before_s`` or later needs."""
        first = self._at(before_s)
        del self.times_s[:first], self.lacks[:first]

    def causes_s(self, begin_s: float, end_s: float, needed: int) -> dict[Cause, float]:
        """Return for how long a request that needed so much KV, in tokens, lacked what."""
        found: dict[Cause, float] = {}
        first = self._at(begin_s)
        ends_s = [*self.times_s[first + 1 :], end_s]
        for until_s, lack in zip(ends_s, self.lacks[first:], strict=True):
            if until_s > begin_s:
                cause: Cause = ("turn" if lack >= needed else "kv") if isinstance(lack, int) else lack
                found[cause] = found.get(cause, 0.0) + until_s - begin_s
                begin_s = until_s
        return found

    def _at(self, time_s: float) -> int:
        return max(0, bisect_right(self.times_s, time_s) - 1)


LOGGED = 4096
"""Changes of what is lacking that are kept before those are dropped that nothing needs any more."""


@attrs.define(eq=False)
class LifeReader:
    """Follows a run, event by event, and keeps the requests that are not over; ``only`` follows one alone.

    KV counts as reserved as long as the chunk does for which it was: where siblings share a prompt, its part
    is counted for the first of them only, so a lack of KV may be taken for a wait for the request's turn.
    """

    only: str | None = None
    _follower: ChunkFollower = attrs.Factory(ChunkFollower)
    _open: dict[str, RequestLife] = attrs.Factory(dict)
    _waits_since: dict[str, float] = attrs.Factory(dict)
    _groups_left: dict[str, int] = attrs.Factory(dict)
    """How many responses each group still lacks."""
    _lacks: _LackLog = attrs.Factory(_LackLog)
    _most_logged: int = LOGGED
    _paused: bool = False

    def read(self, now: float, event: Event, commands: Sequence[Command]) -> list[RequestLife]:
        """Apply an event and its commands; return the lives that are over with it."""
        self._ended(self._follower.read(now, event, commands))
        match event:
            case GroupsSubmitted(groups):
                self._submitted(groups)
            case RolloutPaused():
                self._paused = True
            case RolloutResumed():
                self._paused = False
        over: list[RequestLife] = []
        for command in commands:
            match command:
                case Dispatch(request_id) if request_id in self._open:
                    self._end_wait(self._open[request_id], command.kv_tokens)
                case Complete(request_id, reason):
                    over += self._completed(request_id, reason)
        if commands or not isinstance(event, InstanceReported):
            self._note_lack()
        return over

    def rest(self) -> list[RequestLife]:
        """Return the lives that the end of the trace, or of the run, left open; nothing more is read then."""
        for life in self._open.values():
            self._end_wait(life, life.group.prompt_tokens)
        self._ended(self._follower.rest())
        return [*self._open.values()]

    def _submitted(self, groups: Iterable[GroupSpec]) -> None:
        for group in groups:
            for index in range(group.n):
                request_id = f"{group.id}/{index}"
                if self.only in (None, request_id):
                    self._open[request_id] = RequestLife(request_id, group, self._follower.now, [])
                    self._waits_since[request_id] = self._follower.now
                    self._groups_left[group.id] = group.n

    def _ended(self, chunks: Iterable[ChunkRun]) -> None:
        """Note chunks that are over."""
        for chunk in chunks:
            life = self._open.get(chunk.request_id)
            if life is not None:
                life.parts.append(chunk)
                self._waits_since[chunk.request_id] = chunk.end_s

    def _completed(self, request_id: str, reason: str) -> Iterable[RequestLife]:
        """Yield the request's life, if it is followed."""
        group_id = request_id.rpartition("/")[0]
        if group_id not in self._groups_left:
            return
        life = self._open.pop(request_id, None)
        if life is not None:
            self._end_wait(life, life.group.prompt_tokens)
            life.finished_s, life.finish_reason = self._follower.now, reason
            life.before_it = life.group.n - self._groups_left[group_id]
            yield life
        self._groups_left[group_id] -= 1
        if not self._groups_left[group_id]:
            del self._groups_left[group_id]

    def _end_wait(self, life: RequestLife, needed: int) -> None:
        """Note the wait that ends now, if it took any time; the request then needed so much KV."""
        now, since_s = self._follower.now, self._waits_since.pop(life.request_id, None)
        if since_s is not None and now > since_s:
            life.parts.append(Wait(since_s, now, self._lacks.causes_s(since_s, now, needed)))

    def _note_lack(self) -> None:
        """Note what waiting requests lack from now on, and forget what was before all waits."""
        if not self._waits_since:
            self._lacks = _LackLog()
            return
        self._lacks.note(self._follower.now, self._lack())
        if len(self._lacks.lacks) > self._most_logged:
            self._lacks.forget(min(self._waits_since.values()))
            self._most_logged = max(LOGGED, 2 * len(self._lacks.lacks))

    def _lack(self) -> Cause | int:
        """Return what a waiting request lacks now, or the KV that it may have."""
        if self._paused:
            return "paused"
        places = self._follower.places.values()
        if not places:
            return "instances"
        free = [each.free_kv_tokens for each in places if each.has_slot]
        return max(free) if free else "slots"
