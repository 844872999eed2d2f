"""The chunks of a run, read from its events: where each ran, from when to when, and what it brought."""

from __future__ import annotations

from collections.abc import Iterable

import attrs
import msgspec

from seer_core.model.events import (
    Abort,
    ChunkFailed,
    ChunkFinished,
    Command,
    Dispatch,
    Event,
    InstanceLeaving,
    InstanceLost,
    InstanceStarted,
    InstanceStopped,
)
from seer_core.model.requests import InstanceInfo

__all__ = ["FIGURES", "ChunkFollower", "ChunkRun", "InstanceLoad"]

FIGURES = ("tokens", "steps", "drafted", "accepted", "cached_tokens", "pool_tokens", "prefilled_tokens")
"""The figures of a chunk, as ``ChunkFinished`` has them."""


class ChunkRun(msgspec.Struct, frozen=True, tag=True):
    """A chunk of a request on an instance."""

    request_id: str
    """The request, as ``GROUP/INDEX``."""
    begin_s: float
    """When it was sent, in seconds on the run's clock."""
    end_s: float
    """When it was over, or the trace ended."""
    instance_id: str
    """The instance."""
    max_tokens: int
    """The most tokens that it might generate."""
    kv_tokens: int
    """The KV that was reserved for it, in tokens."""
    why: str
    """The placer's reason for this instance, if it gave one."""
    migrated: bool
    """Whether the chunk before ran on another instance."""
    end: str
    """How it was over, in words."""
    result: ChunkFinished | None = None
    """What it brought, unless it failed or was lost."""
    node: str = ""
    """The instance's node, if it says which."""


@attrs.define
class InstanceLoad:
    """An instance as the trace has it, and the chunks in flight there: when each was sent, and how."""

    info: InstanceInfo
    sent: dict[str, tuple[float, Dispatch]] = attrs.Factory(dict)
    reserved_tokens: int = 0
    """The KV that is reserved for the chunks in flight."""
    leaving: bool = False

    @property
    def has_slot(self) -> bool:
        """Whether it may run one more chunk."""
        return not self.leaving and len(self.sent) < self.info.max_running

    @property
    def free_kv_tokens(self) -> int:
        """The KV that is left."""
        return self.info.kv_capacity_tokens - self.reserved_tokens


@attrs.define
class ChunkFollower:
    """Follows a run, event by event."""

    now: float = 0.0
    places: dict[str, InstanceLoad] = attrs.Factory(dict)
    """The instances that are up, by id."""
    running: int = 0
    """How many chunks are in flight."""
    _over: list[ChunkRun] = attrs.Factory(list)

    def read(self, now: float, event: Event, commands: Iterable[Command]) -> list[ChunkRun]:
        """Apply an event and its commands; return the chunks that are over with it."""
        self.now, self._over = now, []
        match event:
            case InstanceStarted(info):
                self.places[info.id] = InstanceLoad(info)
            case InstanceLeaving(instance_id):
                if instance_id in self.places:
                    self.places[instance_id].leaving = True
            case InstanceLost(instance_id, reason):
                self._gone(instance_id, f"lost with its instance: {reason}")
            case InstanceStopped(instance_id):
                self._gone(instance_id, "given back, as its instance ended")
            case ChunkFinished() as chunk:
                self._end(chunk.request_id, chunk.instance_id, "", chunk)
            case ChunkFailed(request_id, instance_id, reason):
                self._end(request_id, instance_id, f"failed: {reason}")
        for command in commands:
            match command:
                case Dispatch():
                    place = self.places.get(command.instance_id)
                    if place is not None:
                        place.sent[command.request_id] = self.now, command
                        place.reserved_tokens += command.kv_tokens
                        self.running += 1
                case Abort(request_id, instance_id):
                    self._end(request_id, instance_id, "aborted")
        return self._over

    def rest(self) -> list[ChunkRun]:
        """Return the chunks that the end of the trace, or of the run, left open."""
        self._over = []
        for instance_id in list(self.places):
            self._gone(instance_id, "under way when the trace ended")
        return self._over

    def _gone(self, instance_id: str, how: str) -> None:
        place = self.places.get(instance_id)
        for request_id in [] if place is None else list(place.sent):
            self._end(request_id, instance_id, how)
        self.places.pop(instance_id, None)

    def _end(self, request_id: str, instance_id: str, how: str, result: ChunkFinished | None = None) -> None:
        """Note a chunk that is over; ``how`` follows from the result, if there is one."""
        place = self.places.get(instance_id)
        found = None if place is None else place.sent.pop(request_id, None)
        if found is None:
            return
        assert place is not None
        begin_s, sent = found
        place.reserved_tokens -= sent.kv_tokens
        self.running -= 1
        if result is not None:
            short = "ended early" if result.tokens < sent.max_tokens else "whole"
            how = "the model ended the response" if result.stopped else short
        self._over.append(
            ChunkRun(
                request_id,
                begin_s,
                self.now,
                instance_id,
                sent.max_tokens,
                sent.kv_tokens,
                sent.why,
                sent.migrated,
                how,
                result,
                place.info.node,
            )
        )
