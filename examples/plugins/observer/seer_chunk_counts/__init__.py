"""Counts chunks per instance and how responses ended."""

from collections import Counter
from collections.abc import Sequence

from seer_core.model.events import Command, Complete, Dispatch, Event
from seer_core.plugins.hookspecs import hookimpl
from seer_core.ports.policy import Observer


class ChunkCounts(Observer):
    """Observer that counts what was dispatched to whom, and how responses ended."""

    def __init__(self) -> None:
        self.chunks: Counter[str] = Counter()
        self.finish_reasons: Counter[str] = Counter()

    def observe(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        """Take note of an event at ``now`` seconds and of the commands it led to."""
        for command in commands:
            if isinstance(command, Dispatch):
                self.chunks[command.instance_id] += 1
            elif isinstance(command, Complete):
                self.finish_reasons[command.finish_reason] += 1


@hookimpl
def seer_make_observer() -> Observer:
    """Fill the slot, beside others."""
    return ChunkCounts()
