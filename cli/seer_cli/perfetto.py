"""A run's trace as Chrome's trace events, which Perfetto and chrome://tracing draw as lanes.

The format is that of Google's document "Trace Event Format": JSON, times in microseconds.  An instance is a
process, and each of its slots that was in use a thread; a chunk is a slice there, and a move to another
instance a flow from slice to slice.  Counters show the chunks and the reserved KV of each instance, and the
requests that wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import attrs
from seer_trace.chunk_runs import FIGURES, ChunkFollower, ChunkRun
from seer_trace.records import TraceRecord

from seer_cli.chunk_slots import ChunkSlots
from seer_core.model.events import Complete, Dispatch, GroupsSubmitted

__all__ = ["trace_events"]

ROLLOUT = 0
"""The process of what belongs to no instance."""

TraceEvent = dict[str, Any]


@attrs.define(eq=False)
class _Drawing:
    """The lanes, slices and flows so far."""

    instances: dict[str, tuple[int, ChunkSlots]] = attrs.Factory(dict)
    """Each instance's process, and its slots, which are threads."""
    last_slices: dict[str, TraceEvent] = attrs.Factory(dict)
    """The last slice of each request that goes on."""
    flows: int = 0
    open_requests: int = 0

    def lanes_of(self, instance_id: str) -> Iterator[TraceEvent]:
        """Name an instance that comes up for the first time."""
        if instance_id not in self.instances:
            process = len(self.instances) + 1
            self.instances[instance_id] = process, ChunkSlots()
            yield _named("process_name", process, instance_id)

    def slice_of(self, chunk: ChunkRun) -> Iterator[TraceEvent]:
        """Draw a chunk that is over, and the move that brought its request there."""
        process, slots = self.instances[chunk.instance_id]
        slot = slots.give_back(chunk.request_id)
        drawn: TraceEvent = {
            "ph": "X",
            "name": chunk.request_id,
            "cat": "chunk",
            "pid": process,
            "tid": slot,
            "ts": _us(chunk.begin_s),
            "dur": _us(chunk.end_s) - _us(chunk.begin_s),
            "args": _arguments(chunk),
        }
        before = self.last_slices.get(chunk.request_id)
        if before is not None and before["pid"] != drawn["pid"]:
            self.flows += 1
            ended = before["ts"] + before["dur"]
            yield _flow("s", self.flows, before, ended)
            yield {**_flow("f", self.flows, drawn, drawn["ts"]), "bp": "e"}
        self.last_slices[chunk.request_id] = drawn
        yield drawn


def trace_events(records: Iterable[TraceRecord]) -> Iterator[TraceEvent]:
    """Yield the events of a trace, in no order of time."""
    follower, drawing = ChunkFollower(), _Drawing()
    yield _named("process_name", ROLLOUT, "rollout")
    for record in records:
        touched = set()
        for chunk in follower.read(record.now, record.event, record.commands):
            touched.add(chunk.instance_id)
            yield from drawing.slice_of(chunk)
        if isinstance(record.event, GroupsSubmitted):
            drawing.open_requests += sum(group.n for group in record.event.groups)
        for command in record.commands:
            match command:
                case Dispatch(request_id, instance_id) if instance_id in follower.places:
                    touched.add(instance_id)
                    yield from drawing.lanes_of(instance_id)
                    drawing.instances[instance_id][1].take(request_id)
                case Complete(request_id):
                    drawing.open_requests -= 1
                    drawing.last_slices.pop(request_id, None)
        for instance_id in sorted(touched):
            place = follower.places.get(instance_id)
            process, _ = drawing.instances[instance_id]
            running = 0 if place is None else len(place.sent)
            reserved = 0 if place is None else place.reserved_tokens
            yield _counter("chunks", process, record.now, running)
            yield _counter("reserved KV, tokens", process, record.now, reserved)
        if touched:
            waiting = max(0, drawing.open_requests - follower.running)
            yield _counter("waiting requests", ROLLOUT, record.now, waiting)
    for chunk in follower.rest():
        yield from drawing.slice_of(chunk)


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


def _named(what: str, process: int, name: str) -> TraceEvent:
    return {"ph": "M", "name": what, "pid": process, "args": {"name": name}}


def _counter(name: str, process: int, now: float, value: int) -> TraceEvent:
    return {"ph": "C", "name": name, "pid": process, "ts": _us(now), "args": {"value": value}}


def _flow(phase: str, number: int, at: TraceEvent, time_us: int) -> TraceEvent:
    return {
        "ph": phase,
        "name": "move",
        "cat": "move",
        "id": number,
        "pid": at["pid"],
        "tid": at["tid"],
        "ts": time_us,
    }


def _arguments(chunk: ChunkRun) -> dict[str, Any]:
    """Return what a viewer shows of a chunk."""
    found: dict[str, Any] = {"end": chunk.end, "max_tokens": chunk.max_tokens}
    if chunk.why:
        found["why"] = chunk.why
    if chunk.result is not None:
        found |= {name: getattr(chunk.result, name) for name in FIGURES}
    return found
