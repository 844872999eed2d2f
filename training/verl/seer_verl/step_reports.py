"""A page of each step, as ``seer report`` writes it of a run."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import structlog
from seer_cli.report.data import run_of
from seer_cli.report.page import write_page
from seer_cli.report.reading import RunReader
from seer_trace.records import TraceRecord

from seer_core.model.events import Command, Event
from seer_core.ports.policy import Observer

__all__ = ["StepReports"]

log = structlog.get_logger("seer")

AT_ONCE = 1024
"""Events that are read together, beside the loop in which they happen."""


class StepReports(Observer):
    """Reads the events of steps, and writes a page of each into a folder; one that cannot be is logged."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._events: list[TraceRecord] = []
        self._reader = RunReader()
        self._flaw: Exception | None = None
        """Why an event since the last page could not be read."""
        self._thread = ThreadPoolExecutor(1, "seer-report")
        self._names: Counter[str] = Counter()

    def observe(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        """Keep an event until it is read."""
        self._events.append(TraceRecord(now, event, list(commands)))
        if len(self._events) >= AT_ONCE:
            self._thread.submit(self._read, self._take())

    def begin_anew(self) -> None:
        """Forget what has come: the scheduler's next life begins with nothing under way."""
        self._take()
        self._thread.submit(self._reset)

    async def write(self, name: str, summary: Mapping[str, Any]) -> None:
        """Write the page of what has come since the last one; of a name that has one, beside it."""
        self._names[name] += 1
        if (times := self._names[name]) > 1:
            name = f"{name}-{times}"
        work = asyncio.get_running_loop().run_in_executor(
            self._thread, self._write, self._take(), name, summary
        )
        try:
            await work
        except Exception as error:
            log.warning("no_report", step=name, reason=str(error))

    def _take(self) -> list[TraceRecord]:
        taken, self._events = self._events, []
        return taken

    # In the thread.

    def _reset(self) -> None:
        self._reader, self._flaw = RunReader(), None

    def _read(self, events: Sequence[TraceRecord]) -> None:
        try:
            for each in events:
                self._reader.read(each)
        except Exception as error:
            self._flaw = error

    def _write(self, events: Sequence[TraceRecord], name: str, summary: Mapping[str, Any]) -> None:
        self._read(events)
        reader, self._reader = self._reader, self._reader.successor()
        flaw, self._flaw = self._flaw, None
        if flaw is not None:
            raise flaw
        if reader.requests:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_page(self._folder / f"{name}.html", f"Seer: {name}", [run_of(reader, name, summary)])
