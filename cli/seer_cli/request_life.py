"""The life of one request, read from a trace: where it ran, and for what it waited in between."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import attrs
import msgspec

from seer_core.errors import InputError, quote
from seer_core.model import InstanceInfo
from seer_core.model.events import (
    Abort,
    ChunkFailed,
    ChunkFinished,
    Complete,
    Dispatch,
    GroupSpec,
    GroupsSubmitted,
    InstanceLeaving,
    InstanceLost,
    InstanceStarted,
    InstanceStopped,
    RolloutPaused,
    RolloutResumed,
)
from seer_core.scheduling.trace import TraceRecord

__all__ = ["Cause", "ChunkRun", "RequestLife", "Wait", "life_of"]

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


class ChunkRun(msgspec.Struct, frozen=True, tag=True):
    """A chunk of the request on an instance."""

    begin_s: float
    """When it was sent, in seconds on the run's clock."""
    end_s: float
    """When it was over, or the trace ended."""
    instance_id: str
    """The instance."""
    max_tokens: int
    """The most tokens that it might generate."""
    why: str
    """The placer's reason for this instance, if it gave one."""
    migrated: bool
    """Whether the chunk before ran on another instance."""
    end: str
    """How it was over, in words."""
    result: ChunkFinished | None = None
    """What it brought, unless it failed or was lost."""


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


@attrs.define
class _Place:
    """An instance as the trace has it: the chunks in flight there, and the KV reserved for them."""

    info: InstanceInfo
    reserved: dict[str, int] = attrs.Factory(dict)
    leaving: bool = False

    @property
    def has_slot(self) -> bool:
        return not self.leaving and len(self.reserved) < self.info.max_running

    @property
    def free_kv_tokens(self) -> int:
        return self.info.kv_capacity_tokens - sum(self.reserved.values())


@attrs.define
class _LifeReader:
    """Follows a trace; ``moments`` are the parts of the present wait."""

    request_id: str
    life: RequestLife | None = None
    now: float = 0.0
    places: dict[str, _Place] = attrs.Factory(dict)
    paused: bool = False
    waits_since: float | None = None
    sent: tuple[float, Dispatch] | None = None
    moments: list[tuple[float, Cause | int]] = attrs.Factory(list)
    """Seconds, and what lacked in them; a number is the most KV that an instance with a free slot had."""
    complete: int = 0

    def read(self, record: TraceRecord) -> None:
        """Apply an event and its commands."""
        if self.waits_since is not None:
            self.moments.append((record.now - self.now, self._lack()))
        self.now = record.now
        match record.event:
            case GroupsSubmitted(groups):
                self._submitted(groups)
            case InstanceStarted(info):
                self.places[info.id] = _Place(info)
            case InstanceLeaving(instance_id):
                if instance_id in self.places:
                    self.places[instance_id].leaving = True
            case InstanceLost(instance_id, reason):
                self._gone(instance_id, f"lost with its instance: {reason}")
            case InstanceStopped(instance_id):
                self._gone(instance_id, "given back, as its instance ended")
            case ChunkFinished() as chunk:
                self._over(chunk.request_id, chunk.instance_id, "", chunk)
            case ChunkFailed(request_id, instance_id, reason):
                self._over(request_id, instance_id, f"failed: {reason}")
            case RolloutPaused():
                self.paused = True
            case RolloutResumed():
                self.paused = False
        for command in record.commands:
            match command:
                case Dispatch():
                    self._dispatched(command)
                case Abort(request_id, instance_id):
                    self._over(request_id, instance_id, "aborted")
                case Complete(request_id, reason):
                    self._completed(request_id, reason)

    def end(self) -> RequestLife | None:
        """Return the life, with what the trace's end left open."""
        if self.life is not None and self.life.finished_s is None:
            self._end_wait(self.life.group.prompt_tokens)
            self._end_chunk("under way when the trace ended")
        return self.life

    def _submitted(self, groups: Iterable[GroupSpec]) -> None:
        name, _, index = self.request_id.rpartition("/")
        for group in groups:
            if name == group.id and self.life is None and index.isdecimal() and int(index) < group.n:
                self.life = RequestLife(self.request_id, group, self.now, [])
                self.waits_since = self.now

    def _lack(self) -> Cause | int:
        """Return what a waiting request lacks now, or the KV that it may have."""
        if self.paused:
            return "paused"
        if not self.places:
            return "instances"
        free = [each.free_kv_tokens for each in self.places.values() if each.has_slot]
        return max(free) if free else "slots"

    def _dispatched(self, command: Dispatch) -> None:
        place = self.places.get(command.instance_id)
        if place is not None:
            place.reserved[command.request_id] = command.kv_tokens
        if command.request_id == self.request_id:
            self._end_wait(command.kv_tokens)
            self.sent = self.now, command

    def _over(self, request_id: str, instance_id: str, how: str, result: ChunkFinished | None = None) -> None:
        place = self.places.get(instance_id)
        if place is not None:
            place.reserved.pop(request_id, None)
        if request_id == self.request_id:
            self._end_chunk(how, result)

    def _gone(self, instance_id: str, how: str) -> None:
        place = self.places.pop(instance_id, None)
        for request_id in [] if place is None else list(place.reserved):
            self._over(request_id, instance_id, how)

    def _completed(self, request_id: str, reason: str) -> None:
        if self.life is None or request_id.rpartition("/")[0] != self.life.group.id:
            return
        if request_id == self.request_id:
            self._end_wait(self.life.group.prompt_tokens)
            self.life.finished_s, self.life.finish_reason = self.now, reason
            self.life.before_it = self.complete
        self.complete += 1

    def _end_wait(self, needed: int) -> None:
        """Note the wait that ends now, if it took any time; the request then needed so much KV."""
        assert self.life is not None
        if self.waits_since is not None and self.now > self.waits_since:
            causes: dict[Cause, float] = {}
            for seconds, lack in self.moments:
                cause: Cause = ("turn" if lack >= needed else "kv") if isinstance(lack, int) else lack
                if seconds > 0:
                    causes[cause] = causes.get(cause, 0.0) + seconds
            self.life.parts.append(Wait(self.waits_since, self.now, causes))
        self.waits_since = None
        self.moments.clear()

    def _end_chunk(self, how: str, result: ChunkFinished | None = None) -> None:
        """Note the chunk that is over now; ``how`` follows from the result, if there is one."""
        if self.sent is None:
            return
        assert self.life is not None
        begin_s, sent = self.sent
        if result is not None:
            short = "ended early" if result.tokens < sent.max_tokens else "whole"
            how = "the model ended the response" if result.stopped else short
        self.life.parts.append(
            ChunkRun(
                begin_s,
                self.now,
                sent.instance_id,
                sent.max_tokens,
                sent.why,
                sent.migrated,
                how,
                result,
            )
        )
        self.sent, self.waits_since = None, self.now


def life_of(request_id: str, records: Iterable[TraceRecord]) -> RequestLife:
    """Return the life of a request, ``GROUP/INDEX``.

    KV counts as reserved as long as the chunk does for which it was: where siblings share a prompt, its part
    is counted for the first of them only, so a lack of KV may be taken for a wait for the request's turn.

    Raises:
        InputError: the trace has no such request.
    """
    reader = _LifeReader(request_id)
    groups: list[str] = []
    for record in records:
        if isinstance(record.event, GroupsSubmitted):
            groups += [each.id for each in record.event.groups[: max(0, 3 - len(groups))]]
        reader.read(record)
    life = reader.end()
    if life is None:
        named = ", ".join(quote(f"{each}/0") for each in groups)
        raise InputError(
            f"the trace has no request {quote(request_id)}; name one as GROUP/INDEX"
            + (f", like {named}" if named else "")
        )
    return life
