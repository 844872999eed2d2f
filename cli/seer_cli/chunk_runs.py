"""The chunks of a run, read from a trace: where each ran, from when to when, and what it brought."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

import attrs
import msgspec

from seer_core.model import InstanceInfo
from seer_core.model.events import (
    Abort,
    ChunkFailed,
    ChunkFinished,
    Command,
    Dispatch,
    Event,
    GroupsSubmitted,
    InstanceLeaving,
    InstanceLimited,
    InstanceLost,
    InstanceStarted,
    InstanceStopped,
    RolloutPaused,
    RolloutResumed,
)
from seer_core.scheduling.trace import TraceRecord

__all__ = ["Cause", "ChunkFollower", "ChunkRun", "InstanceLoad", "chunks_of", "group_of"]

Cause = Literal["slots", "kv", "turn", "paused", "instances"]
"""What a waiting request lacked: a free slot on any instance; room for its KV on an instance with a free
slot; nothing but its turn, for other requests were preferred or its instance was another one; a rollout that
is not paused; any instance at all."""


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


@attrs.define
class InstanceLoad:
    """An instance as the trace has it, and the chunks in flight there: when each was sent, and how."""

    info: InstanceInfo
    sent: dict[str, tuple[float, Dispatch]] = attrs.Factory(dict)
    reserved_tokens: int = 0
    """The KV that is reserved for the chunks in flight, a prompt that siblings share counted once."""
    leaving: bool = False
    _siblings: dict[str, int] = attrs.Factory(dict)
    """How many chunks of each group are in flight, where siblings share their prompt."""

    @property
    def has_slot(self) -> bool:
        """Whether it may run one more chunk."""
        return not self.leaving and len(self.sent) < self.info.max_running

    @property
    def free_kv_tokens(self) -> int:
        """The KV that is left."""
        return self.info.kv_capacity_tokens - self.reserved_tokens

    def add(self, now: float, sent: Dispatch, group: str, prompts: Mapping[str, int]) -> None:
        """Note a chunk that is sent here, of that group; ``prompts`` are the lengths of groups' prompts."""
        self.sent[sent.request_id] = now, sent
        self.reserved_tokens += sent.kv_tokens
        if self.info.shares_prompts:
            count = self._siblings.get(group, 0)
            self._siblings[group] = count + 1
            if count:
                self.reserved_tokens -= self._shared(prompts.get(group, 0))

    def remove(
        self, request_id: str, group: str, prompts: Mapping[str, int]
    ) -> tuple[float, Dispatch] | None:
        """Note that a chunk is over; return when and how it was sent, or None if it was not here."""
        found = self.sent.pop(request_id, None)
        if found is None:
            return None
        self.reserved_tokens -= found[1].kv_tokens
        if self.info.shares_prompts:
            count = self._siblings.pop(group) - 1
            if count:
                self._siblings[group] = count
                self.reserved_tokens += self._shared(prompts.get(group, 0))
        return found

    def _shared(self, prompt_tokens: int) -> int:
        """Return the KV of a prompt that siblings hold once: its full blocks, but for the last token."""
        block = self.info.block_tokens
        return max(0, prompt_tokens - 1) // block * block


@attrs.define
class ChunkFollower:
    """Follows a trace, record by record."""

    now: float = 0.0
    places: dict[str, InstanceLoad] = attrs.Factory(dict)
    """The instances that are up, by id."""
    running: int = 0
    """How many chunks are in flight."""
    paused: bool = False
    """Whether no chunk is sent."""
    _prompts: dict[str, int] = attrs.Factory(dict)
    """The tokens of each group's prompt."""
    _over: list[ChunkRun] = attrs.Factory(list)

    def read(self, record: TraceRecord) -> list[ChunkRun]:
        """Apply an event and its commands; return the chunks that are over with it."""
        return self.follow(record.now, record.event, record.commands)

    def follow(self, now: float, event: Event, commands: Sequence[Command]) -> list[ChunkRun]:
        """Do the same with an event and its commands, as an observer gets them."""
        self.now, self._over = now, []
        match event:
            case ChunkFinished():  # first, for most events are: each case is a check of its own
                self._end(event.request_id, event.instance_id, "", event)
            case GroupsSubmitted(groups):
                self._prompts |= {group.id: group.prompt_tokens for group in groups}
            case RolloutPaused():
                self.paused = True
            case RolloutResumed():
                self.paused = False
            case InstanceStarted(info):
                self.places[info.id] = InstanceLoad(info)
            case InstanceLeaving(instance_id):
                if instance_id in self.places:
                    self.places[instance_id].leaving = True
            case InstanceLimited(instance_id, max_running):
                if (limited := self.places.get(instance_id)) is not None:
                    limited.info = msgspec.structs.replace(limited.info, max_running=max_running)
            case InstanceLost(instance_id, reason):
                self._gone(instance_id, f"lost with its instance: {reason}")
            case InstanceStopped(instance_id):
                self._gone(instance_id, "given back, as its instance ended")
            case ChunkFailed(request_id, instance_id, reason):
                self._end(request_id, instance_id, f"failed: {reason}")
        for command in commands:
            match command:
                case Dispatch():
                    place = self.places.get(command.instance_id)
                    if place is not None:
                        place.add(now, command, group_of(command.request_id), self._prompts)
                        self.running += 1
                case Abort(request_id, instance_id):
                    self._end(request_id, instance_id, "aborted")
        return self._over

    def rest(self) -> list[ChunkRun]:
        """Return the chunks that the trace's end left open."""
        self._over = []
        for instance_id in list(self.places):
            self._gone(instance_id, "under way when the trace ended")
        return self._over

    def lack(self) -> Cause | int:
        """Return what no waiting request has now, or the most KV that an instance with a free slot has."""
        if self.paused:
            return "paused"
        if not self.places:
            return "instances"
        free = [each.free_kv_tokens for each in self.places.values() if each.has_slot]
        return max(free) if free else "slots"

    def _gone(self, instance_id: str, how: str) -> None:
        place = self.places.get(instance_id)
        for request_id in [] if place is None else list(place.sent):
            self._end(request_id, instance_id, how)
        self.places.pop(instance_id, None)

    def _end(self, request_id: str, instance_id: str, how: str, result: ChunkFinished | None = None) -> None:
        """Note a chunk that is over; ``how`` follows from the result, if there is one."""
        place = self.places.get(instance_id)
        found = None if place is None else place.remove(request_id, group_of(request_id), self._prompts)
        if found is None:
            return
        begin_s, sent = found
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
            )
        )


def group_of(request_id: str) -> str:
    """Return the group of a request, ``GROUP/INDEX``."""
    return request_id.rpartition("/")[0]


def chunks_of(records: Iterable[TraceRecord]) -> Iterator[ChunkRun]:
    """Yield all chunks of a trace, each when it is over."""
    follower = ChunkFollower()
    for record in records:
        yield from follower.read(record)
    yield from follower.rest()
