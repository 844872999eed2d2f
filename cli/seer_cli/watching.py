"""Sessions from Python that are watched as commands are: by a trace, a page and a dashboard."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import structlog
from seer_host.config_files import Config
from seer_session import Session
from seer_session.journal import Journal
from seer_session.session import SessionRollout
from seer_trace.records import TraceWriter

from seer_cli.controls import RunControls
from seer_cli.output import check_writable, unwritable
from seer_cli.report.dashboard import Dashboard
from seer_cli.report.feed import FeedReader
from seer_cli.report.page import write_page
from seer_core.errors import OutputError
from seer_core.model.events import Command, Event
from seer_core.ports.policy import Observer

__all__ = ["WatchedSession"]

LATEST = 6
"""The rollouts that a page has side by side."""

log = structlog.get_logger("seer")


class WatchedSession(Session):
    """A session whose rollouts can be looked at, while they go on and later.

    Args:
        config: the configuration or its file, as for ``Session``.
        observers: those of the caller.
        journal: as for ``Session``.
        name: what the pages are called.
        trace: a file of all events, for ``seer report`` and ``seer explain`` if it is called
            ``trace.jsonl``; it replaces an earlier one and grows with every rollout.
        report: a page of the latest six rollouts, written anew after each, as ``seer report`` writes it.
        dashboard: a port of this machine, 0 for a free one, that serves the page while rollouts go on, with
            its buttons.  Its address is printed on standard error.

    A page that cannot be written is logged, and ends nothing.

    Raises:
        ConfigError, PluginError: as ``Session``.
        OutputError: a file cannot be written, or, at the start, the port is taken.
    """

    def __init__(
        self,
        config: Config | str | Path,
        observers: Iterable[Observer] = (),
        *,
        journal: Journal | None = None,
        name: str = "session",
        trace: str | Path | None = None,
        report: str | Path | None = None,
        dashboard: int | None = None,
    ) -> None:
        self._trace = None if trace is None else _Trace(Path(trace))
        self._report = None if report is None else Path(report)
        check_writable(None if trace is None else Path(trace), self._report)
        self._title, self._port = f"Seer: {name}", dashboard
        self._feeds = FeedReader()
        self._watching = ExitStack()
        self._writing: Future[None] | None = None
        seen: list[Observer] = [*observers]
        if self._trace is not None:
            seen.append(self._trace)
        if report is not None or dashboard is not None:
            seen.append(self._feeds.watch("rollout", LATEST))
        super().__init__(config, seen, journal=journal)

    def start(self) -> None:
        """Open what is to be watched, and start all engines; raises as ``Session.start``."""
        if self._thread is None:  # else it is refused
            self._open_watch()
        super().start()

    def close(self) -> None:
        """Stop all engines, and close what is watched; idempotent, as ``Session.close``."""
        super().close()
        if os.getpid() == self._pid:
            self._watching.close()

    @contextmanager
    def open(self, **how: Any) -> Iterator[SessionRollout]:
        """Begin a rollout, as ``Session.open``; the page is written when it is over."""
        try:
            with super().open(**how) as rollout:
                yield rollout
        finally:
            if self._writing is not None:
                self._writing.cancel()  # one that waits for its turn; this one has more
            if self._report is not None:
                self._writing = self._pages.submit(self._write_page, self._report)

    def _open_watch(self) -> None:
        with ExitStack() as opening:
            if self._trace is not None:
                opening.enter_context(self._trace)
            if self._port is None:
                opening.enter_context(self._feeds)
            else:
                controls = RunControls()
                controls.attach(self.runtime, self.submit)
                opening.enter_context(Dashboard(self._title, self._port, controls, self._feeds))
            self._pages = opening.enter_context(ThreadPoolExecutor(1, "seer-page"))
            self._watching = opening.pop_all()

    def _write_page(self, path: Path) -> None:
        try:
            if runs := self._feeds.runs():
                write_page(path, self._title, runs)
        except OutputError as error:
            log.warning("no_report", reason=str(error))


class _Trace(Observer):
    """Writes a trace from its start to its end, also where the observers begin anew meanwhile."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        try:
            self._writer = TraceWriter(self._path)
        except OSError as error:
            raise unwritable(self._path, error) from error

    def __exit__(self, *_: object) -> None:
        self._writer.close()

    def observe(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        """Write an event."""
        self._writer.observe(now, event, commands)
