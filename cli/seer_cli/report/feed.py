"""Events of a run on their way to a page: kept as they come, read later and elsewhere."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from seer_trace.records import TraceRecord

from seer_cli.report.data import RunData, run_of
from seer_cli.report.reading import RunReader
from seer_core.model.events import Command, Event, GroupsSubmitted
from seer_core.ports.policy import Observer

__all__ = ["FeedReader", "RunFeed"]

READ_EVERY_S = 0.5

MOST_REQUESTS = 20_000
"""Requests after which another window begins, however short the last one was; those that were open when it
began do not count.
"""


class RunFeed(Observer):
    """An observer that only keeps events; ``read`` and ``runs`` are for one other thread at a time.

    With ``rollouts`` above 1 groups that come when all others are over begin another rollout, as iterations
    of training do, and so many of the latest are kept.  With ``window_s`` a run has no end: it is read in
    windows of so many seconds, of which the present one and the one before it are kept.
    """

    def __init__(self, name: str, rollouts: int = 1, window_s: float | None = None) -> None:
        self.name = name
        self._splits, self._window_s = rollouts > 1, window_s
        self._records: deque[TraceRecord] = deque()
        kept = rollouts if window_s is None else 2
        self._readers: deque[tuple[int, RunReader]] = deque([(1, RunReader())], kept)

    def observe(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        """Keep an event until it is read."""
        self._records.append(TraceRecord(now, event, list(commands)))

    def read(self) -> None:
        """Read what has happened."""
        while self._records:
            record = self._records.popleft()
            number, reader = self._readers[-1]
            if reader.requests and self._begins_anew(reader, record):
                reader = reader.successor()
                self._readers.append((number + 1, reader))
            reader.read(record)

    def _begins_anew(self, reader: RunReader, record: TraceRecord) -> bool:
        if self._window_s is not None:
            new = reader.requests - reader.carried
            return record.now - (reader.start_s or 0.0) > self._window_s or new > MOST_REQUESTS
        return self._splits and isinstance(record.event, GroupsSubmitted) and not reader.open_requests

    def runs(self) -> list[RunData]:
        """Return what a page shows of the rollouts, or of the windows, the latest last."""
        self.read()
        latest = self._readers[-1][0]
        return [
            run_of(reader, self._name_of(number, latest))
            for number, reader in self._readers
            if reader.requests
        ]

    def _name_of(self, number: int, latest: int) -> str:
        if self._window_s is not None:
            return "now" if number == latest else "before"
        return f"{self.name} {number}" if self._splits else self.name


class FeedReader:
    """Reads the feeds of runs while these go on, in a thread of its own; a context manager."""

    def __init__(self) -> None:
        self._feeds: list[RunFeed] = []
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    def watch(self, name: str, rollouts: int = 1, window_s: float | None = None) -> RunFeed:
        """Return a new feed, for the observers of a run; its arguments are those of ``RunFeed``."""
        feed = RunFeed(name, rollouts, window_s)
        with self._lock:
            self._feeds.append(feed)
        return feed

    def runs(self) -> list[RunData]:
        """Return what a page shows of all runs; from any thread."""
        with self._lock:
            return [run for feed in self._feeds for run in feed.runs()]

    def __enter__(self) -> FeedReader:
        threading.Thread(target=self._read, name="seer-feed-reader", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()

    def _read(self) -> None:
        while not self._stopped.wait(READ_EVERY_S):
            with self._lock:
                for feed in self._feeds:
                    feed.read()
