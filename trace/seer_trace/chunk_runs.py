"""The chunks of a run, read from a trace: where each ran, from when to when, and what it brought."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import attrs
import msgspec

from seer_core.model.events import (
    Abort,
    AskEnvironment,
    ChunkFailed,
    ChunkFinished,
    Command,
    Complete,
    Dispatch,
    EnvironmentAnswered,
    EnvironmentFailed,
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
from seer_core.model.requests import InstanceInfo
from seer_trace.most_free import MostFree

__all__ = ["FIGURES", "Cause", "ChunkFollower", "ChunkRun", "InstanceLoad", "group_of"]

FIGURES = ("tokens", "steps", "drafted", "accepted", "cached_tokens", "pool_tokens", "prefilled_tokens")
"""The figures of a chunk, as ``ChunkFinished`` has them."""

Cause = Literal["slots", "kv", "turn", "paused", "instances", "environment"]
"""What a waiting request lacked: a free slot on any instance; room for its KV on an instance with a free
slot; nothing but its turn, for other requests were preferred or its instance was another one; a rollout that
is not paused; any instance at all; or, of a request that acts, its environment's answer."""


class ChunkRun(msgspec.Struct, frozen=True, gc=False, tag=True):
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


@attrs.define(eq=False)
class SharedPrompt:
    """A prompt whose KV the chunks of a group that are in flight on an instance hold once."""

    group_id: str
    kv_tokens: int
    chunks: int = 0


@attrs.define
class InstanceLoad:
    """An instance as the trace has it, and the chunks in flight there: when each was sent, and how."""

    info: InstanceInfo
    sent: dict[str, tuple[float, Dispatch, SharedPrompt | None]] = attrs.Factory(dict)
    reserved_tokens: int = 0
    """The KV that is reserved for the chunks in flight, a prompt that siblings share counted once."""
    leaving: bool = False
    _shared: dict[str, SharedPrompt] = attrs.Factory(dict)
    """The prompts of groups with chunks in flight, where siblings share theirs."""

    def add(self, now: float, sent: Dispatch, prompt_tokens: Mapping[str, int]) -> None:
        """Note a chunk that is sent here; groups have prompts of so many tokens."""
        self.reserved_tokens += sent.kv_tokens
        prompt = None
        if self.info.shares_prompts:
            group_id = group_of(sent.request_id)
            prompt = self._shared.get(group_id)
            if prompt is None:
                block = self.info.block_tokens  # siblings share full blocks, but for the last token
                shared = max(0, prompt_tokens.get(group_id, 0) - 1) // block * block
                prompt = self._shared[group_id] = SharedPrompt(group_id, shared)
            else:
                self.reserved_tokens -= prompt.kv_tokens
            prompt.chunks += 1
        self.sent[sent.request_id] = now, sent, prompt

    def remove(self, request_id: str) -> tuple[float, Dispatch] | None:
        """Note that a chunk is over; return when and how it was sent, or None if it was not here."""
        found = self.sent.pop(request_id, None)
        if found is None:
            return None
        begin_s, sent, prompt = found
        self.reserved_tokens -= sent.kv_tokens
        if prompt is not None:
            prompt.chunks -= 1
            if prompt.chunks:
                self.reserved_tokens += prompt.kv_tokens
            else:
                del self._shared[prompt.group_id]
        return begin_s, sent


@attrs.define
class ChunkFollower:
    """Follows a trace, record by record.

    An instance that starts while it is up has a new scheduler: a rollout has failed, and all its requests,
    which have no end in the trace, are dropped.
    """

    now: float = 0.0
    places: dict[str, InstanceLoad] = attrs.Factory(dict)
    """The instances that are up, by id."""
    running: int = 0
    """How many chunks are in flight."""
    paused: bool = False
    """Whether no chunk is sent."""
    acting: dict[str, float] = attrs.Factory(dict)
    """Since when each request acts whose environment has not answered."""
    _prompts: dict[str, int] = attrs.Factory(dict)
    """The tokens of the prompt of each group that is not over."""
    _left: dict[str, int] = attrs.Factory(dict)
    """How many responses each of them lacks."""
    _over: list[ChunkRun] = attrs.Factory(list)
    changed: set[str] = attrs.Factory(set)
    """The instances whose load has changed since ``lack`` was asked."""
    _free: MostFree = attrs.Factory(MostFree)

    def read(self, now: float, event: Event, commands: Sequence[Command]) -> list[ChunkRun]:
        """Apply an event and its commands; return the chunks that are over with it."""
        self.now, self._over = now, []
        match event:
            case ChunkFinished():
                asks = event.stopped and any(type(command) is AskEnvironment for command in commands)
                how = "the model ended its turn" if asks else ""
                self._end(event.request_id, event.instance_id, how, event)
            case GroupsSubmitted(groups):
                for group in groups:
                    self._prompts[group.id], self._left[group.id] = group.prompt_tokens, group.n
            case RolloutPaused():
                self.paused = True
            case RolloutResumed():
                self.paused = False
            case InstanceStarted(info):
                if info.id in self.places:
                    self._drop_requests()
                self.places[info.id] = InstanceLoad(info)
                self.changed.add(info.id)
            case InstanceLeaving(instance_id):
                if instance_id in self.places:
                    self.places[instance_id].leaving = True
                    self.changed.add(instance_id)
            case InstanceLimited(instance_id, max_running):
                if (limited := self.places.get(instance_id)) is not None:
                    limited.info = msgspec.structs.replace(limited.info, max_running=max_running)
                    self.changed.add(instance_id)
            case InstanceLost(instance_id, reason):
                self._gone(instance_id, f"lost with its instance: {reason}")
            case InstanceStopped(instance_id):
                self._gone(instance_id, "given back, as its instance ended")
            case ChunkFailed(request_id, instance_id, reason):
                self._end(request_id, instance_id, f"failed: {reason}")
            case EnvironmentAnswered(request_id) | EnvironmentFailed(request_id):
                self.acting.pop(request_id, None)
        for command in commands:
            match command:
                case Dispatch():
                    place = self.places.get(command.instance_id)
                    if place is not None:
                        place.add(self.now, command, self._prompts)
                        self.changed.add(command.instance_id)
                        self.running += 1
                case Abort(request_id, instance_id):
                    self._end(request_id, instance_id, "aborted")
                case Complete(request_id):
                    self.acting.pop(request_id, None)
                    self._completed(group_of(request_id))
                case AskEnvironment(request_id):
                    self.acting[request_id] = self.now
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
        for name in self.changed:
            place = self.places.get(name)
            if place is None or place.leaving or len(place.sent) >= place.info.max_running:
                self._free.note(name, -1)
            else:
                self._free.note(name, max(0, place.info.kv_capacity_tokens - place.reserved_tokens))
        self.changed.clear()
        most = self._free.most()
        return most if most >= 0 else "slots"

    def _completed(self, group_id: str) -> None:
        left = self._left.pop(group_id, 1) - 1
        if left:
            self._left[group_id] = left
        else:
            self._prompts.pop(group_id, None)

    def _drop_requests(self) -> None:
        for instance_id in self.places:
            self._end_all(instance_id, "dropped, as the rollout failed")
        self.paused = False
        for each in (self.acting, self._prompts, self._left):
            each.clear()

    def _end_all(self, instance_id: str, how: str) -> None:
        place = self.places.get(instance_id)
        for request_id in [] if place is None else list(place.sent):
            self._end(request_id, instance_id, how)

    def _gone(self, instance_id: str, how: str) -> None:
        self._end_all(instance_id, how)
        self.places.pop(instance_id, None)
        self.changed.add(instance_id)

    def _end(self, request_id: str, instance_id: str, how: str, result: ChunkFinished | None = None) -> None:
        """Note a chunk that is over; ``how`` follows from the result, if there is one."""
        place = self.places.get(instance_id)
        found = None if place is None else place.remove(request_id)
        if place is None or found is None:
            return
        begin_s, sent = found
        self.changed.add(instance_id)
        self.running -= 1
        if result is not None and not how:
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


def group_of(request_id: str) -> str:
    """Return the group of a request, ``GROUP/INDEX``."""
    return request_id.rpartition("/")[0]
