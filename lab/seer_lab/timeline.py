"""The states of instances over time: an observer of one simulated rollout."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import msgspec

from seer_core.model.events import (
    Abort,
    ChunkFailed,
    ChunkFinished,
    Command,
    Dispatch,
    Event,
    InstanceLost,
    InstanceReported,
    InstanceStarted,
)
from seer_core.ports.policy import Observer

__all__ = ["InstanceTimeline", "LoadSample", "Timeline"]


class LoadSample(msgspec.Struct, frozen=True, array_like=True):
    """An instance's load from ``at_s`` to the next sample; ``kv_usage`` is the part of its KV in use."""

    at_s: float
    running: int
    waiting: int
    kv_usage: float


class InstanceTimeline(msgspec.Struct, frozen=True):
    """One instance: its load over time, and the seconds during which it had anything to do."""

    id: str
    samples: list[LoadSample]
    busy_s: float


@attrs.define(eq=False)
class _Instance:
    samples: list[LoadSample] = attrs.Factory(list)
    in_flight: int = 0
    since_s: float = 0.0
    busy_s: float = 0.0

    def more(self, now: float) -> None:
        if self.in_flight == 0:
            self.since_s = now
        self.in_flight += 1

    def fewer(self, now: float, by: int = 1) -> None:
        if self.in_flight and self.in_flight == by:
            self.busy_s += now - self.since_s
            self.samples.append(LoadSample(now, 0, 0, 0.0))
        self.in_flight -= by


class Timeline(Observer):
    """Observer that writes down every instance's load; ``instances`` at the end of the rollout."""

    def __init__(self) -> None:
        self._instances: dict[str, _Instance] = {}
        self._now = 0.0

    def observe(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        """Take note."""
        self._now = now
        # Before the event itself: what is sent to an instance at once keeps it busy.
        for command in commands:
            if isinstance(command, Dispatch):
                self._instances[command.instance_id].more(now)
        match event:
            case ChunkFinished() | ChunkFailed():
                self._instances[event.instance_id].fewer(now)
            case InstanceReported() if self._instances[event.instance_id].in_flight:
                sample = LoadSample(now, event.running, event.waiting, event.kv_usage)
                self._instances[event.instance_id].samples.append(sample)
            case InstanceStarted():
                self._instances.setdefault(event.info.id, _Instance()).samples.append(
                    LoadSample(now, 0, 0, 0.0)
                )
            case InstanceLost():
                lost = self._instances[event.instance_id]
                lost.fewer(now, lost.in_flight)
            case _:
                pass
        for command in commands:
            if isinstance(command, Abort):
                self._instances[command.instance_id].fewer(now)

    def instances(self) -> list[InstanceTimeline]:
        """Return every instance's story so far, in the order of their start."""
        return [
            InstanceTimeline(
                name,
                instance.samples,
                instance.busy_s + (self._now - instance.since_s if instance.in_flight else 0.0),
            )
            for name, instance in self._instances.items()
        ]
