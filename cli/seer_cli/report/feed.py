"""Events of a run on their way to a page: kept as they come, read later and elsewhere."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from seer_cli.report.data import RunData, run_of
from seer_cli.report.reading import RunReader
from seer_core.model.events import Command, Event, GroupsSubmitted
from seer_core.ports.policy import Observer
from seer_core.scheduling.trace import TraceRecord

__all__ = ["RunFeed"]


class RunFeed(Observer):
    """An observer that only keeps events; ``read`` and ``runs`` are for one other thread at a time.

    With ``rollouts`` above 1 groups that come when all others are over begin another rollout, as iterations
    of training do, and so many of the latest are kept.
    """

    def __init__(self, name: str, rollouts: int = 1) -> None:
        self.name = name
        self._splits = rollouts > 1
        self._records: deque[TraceRecord] = deque()
        self._readers: deque[tuple[str, RunReader]] = deque([(name, RunReader())], rollouts)
        self._number = 1

    def observe(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        """Keep an event until it is read."""
        self._records.append(TraceRecord(now, event, list(commands)))

    def read(self) -> None:
        """Read what has happened."""
        while self._records:
            record = self._records.popleft()
            _, reader = self._readers[-1]
            if self._splits and isinstance(record.event, GroupsSubmitted):
                if reader.requests and not reader.open_requests:
                    reader = reader.successor()
                    self._number += 1
                    self._readers.append((f"{self.name} {self._number}", reader))
                elif not reader.requests:
                    self._readers[-1] = f"{self.name} {self._number}", reader
            reader.read(record)

    def runs(self) -> list[RunData]:
        """Return what a page shows of the rollouts, the latest last."""
        self.read()
        return [run_of(reader, name) for name, reader in self._readers if reader.requests]
