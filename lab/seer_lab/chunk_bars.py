"""Chunks over time, as a trace has them: on which instance, from when to when, side by side in lanes."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

import attrs
from seer_trace.records import TraceRecord

from seer_core.errors import InputError
from seer_core.model.events import (
    ChunkFailed,
    ChunkFinished,
    Complete,
    Dispatch,
    GroupsSubmitted,
    InstanceLost,
    InstanceStopped,
    RequestsAborted,
)

__all__ = ["TAIL_SHARE", "ChunkBar", "RolloutBars", "bars_of"]

TAIL_SHARE = 0.9
"""Share of the responses that are over when the tail begins."""


@attrs.frozen
class ChunkBar:
    """A chunk from its dispatch to its end, in seconds since the first group was submitted.

    ``lane`` is its place among those that run beside it on the instance, from 0.  ``probe``: it is of the
    first response of its group.
    """

    instance_id: str
    lane: int
    begin_s: float
    end_s: float
    probe: bool


@attrs.frozen
class RolloutBars:
    """The bars of a rollout, its instances in the order of their names, and when its tail begins and ends."""

    bars: list[ChunkBar]
    instances: list[str]
    tail_s: float
    end_s: float

    @property
    def lanes(self) -> int:
        """The most lanes that an instance has."""
        return 1 + max(bar.lane for bar in self.bars)


def bars_of(records: Iterable[TraceRecord]) -> RolloutBars:
    """Return the chunks of a trace.

    Raises:
        InputError: no response in it is over.
    """
    chunks = _Chunks()
    ends: list[float] = []
    first_s: float | None = None
    for record in records:
        event = record.event
        if first_s is None and isinstance(event, GroupsSubmitted):
            first_s = record.now
        now_s = record.now - (first_s or 0.0)
        match event:
            case ChunkFinished() | ChunkFailed():
                chunks.end(event.request_id, now_s)
            case InstanceLost() | InstanceStopped():
                chunks.end_all(event.instance_id, now_s)
            case RequestsAborted():
                for name in event.request_ids:
                    chunks.end(name, now_s)
            case _:
                pass
        for command in record.commands:
            if isinstance(command, Dispatch):
                chunks.begin(command.request_id, command.instance_id, now_s)
            ends += [now_s] * isinstance(command, Complete)
    if not ends or not chunks.bars:
        raise InputError("no response of the trace is over, so there is nothing to draw")
    tail_s = sorted(ends)[min(len(ends) - 1, int(TAIL_SHARE * len(ends)))]
    return RolloutBars(chunks.bars, sorted({bar.instance_id for bar in chunks.bars}), tail_s, max(ends))


class _Chunks:
    """Chunks under way, and the bars of those that have ended."""

    def __init__(self) -> None:
        self.bars: list[ChunkBar] = []
        self._running: dict[str, tuple[str, int, float]] = {}
        self._free: dict[str, list[int]] = {}
        self._used: dict[str, int] = {}

    def begin(self, request_id: str, instance_id: str, now_s: float) -> None:
        free = self._free.setdefault(instance_id, [])
        if free:
            lane = heapq.heappop(free)
        else:
            lane = self._used.get(instance_id, 0)
            self._used[instance_id] = lane + 1
        self._running[request_id] = instance_id, lane, now_s

    def end(self, request_id: str, now_s: float) -> None:
        if (found := self._running.pop(request_id, None)) is not None:
            instance_id, lane, begin_s = found
            heapq.heappush(self._free[instance_id], lane)
            self.bars.append(ChunkBar(instance_id, lane, begin_s, now_s, request_id.endswith("/0")))

    def end_all(self, instance_id: str, now_s: float) -> None:
        for name in [name for name, (where, *_) in self._running.items() if where == instance_id]:
            self.end(name, now_s)
