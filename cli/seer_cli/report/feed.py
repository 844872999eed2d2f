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
        self._readers: deque[tuple[int, RunReader]] = deque([(1, RunReader())], rollouts)

    def observe(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        """Keep an event until it is read."""
        self._records.append(TraceRecord(now, event, list(commands)))

    def read(self) -> None:
        """Read what has happened."""
        while self._records:
            record = self._records.popleft()
            number, reader = self._readers[-1]
            begins = self._splits and isinstance(record.event, GroupsSubmitted)
            if begins and reader.requests and not reader.open_requests:
                reader = reader.successor()
                self._readers.append((number + 1, reader))
            reader.read(record)

    def runs(self) -> list[RunData]:
        """Return what a page shows of the rollouts, the latest last."""
        self.read()
        return [
            run_of(reader, f"{self.name} {number}" if self._splits else self.name)
            for number, reader in self._readers
            if reader.requests
        ]
