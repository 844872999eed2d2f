"""The display: a live view on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live

from seer_cli.display_frame import frame_of, line_of
from seer_cli.progress import RunProgress
from seer_core.model.events import Command, Event
from seer_core.ports.policy import Observer
from seer_core.scheduling.scheduler import CORE, Slot

__all__ = ["Display"]

LINE_EVERY_S = 5.0
FRAME_EVERY_S = 0.25
FRAME_SHARE = 0.05
"""The most of the run's time that frames take, however many requests there are."""


class Display(Observer):
    """Shows a rollout on standard error while it runs; an observer and a context manager.

    Without a terminal it prints a line every few seconds, so that a log file stays readable.
    """

    def __init__(self, title: str, stream: TextIO | None = None) -> None:
        self.title = title
        self.progress = RunProgress()
        stream = stream or sys.stderr
        is_terminal = stream.isatty()  # Rich takes FORCE_COLOR for a terminal
        self._console = Console(
            file=stream,
            force_terminal=is_terminal,
            highlight=False,
            markup=False,
            emoji=False,
            soft_wrap=True,
        )
        self._live = (
            # No thread of its own: what it shows changes only in ``observe``.
            Live(get_renderable=self._render, console=self._console, auto_refresh=False, transient=True)
            if is_terminal and not self._console.is_dumb_terminal
            else None
        )
        self._every_s = LINE_EVERY_S if self._live is None else FRAME_EVERY_S
        self._last_shown = time.monotonic()
        self._started_s: float | None = None
        self._began_s = 0.0

    @property
    def slot(self) -> Slot[Observer]:
        """This display as a filled observer slot."""
        return Slot("observer", CORE, self)

    def __enter__(self) -> Display:
        if self._live is not None:
            self._live.start(refresh=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._every_s = math.inf  # what comes now, the end of the instances, is no part of it
        if self._live is not None:
            self._live.stop()

    def observe(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        """Count, and now and then show it: a new frame on a terminal, a line elsewhere."""
        self.progress.observe(now, event, commands)
        if self.progress.started_s != self._started_s:
            self._started_s, self._began_s = self.progress.started_s, time.monotonic()
        if time.monotonic() - self._last_shown < self._every_s:
            return
        self._last_shown = time.monotonic()
        if self._live is not None:
            self._live.refresh()
            took_s = time.monotonic() - self._last_shown
            self._every_s = max(FRAME_EVERY_S, took_s / FRAME_SHARE)
        else:
            self._console.print(line_of(self.title, self.progress, self._left_s()))

    def _left_s(self) -> float | None:
        """Estimate the time left in real seconds, also where the run's clock is a simulated one."""
        left_s, started_s = self.progress.left_s, self.progress.started_s
        if left_s is None or started_s is None or self.progress.now <= started_s:
            return None
        return left_s * (time.monotonic() - self._began_s) / (self.progress.now - started_s)

    def _render(self) -> Group:
        width, height = self._console.size
        ascii_only = self._console.options.ascii_only
        return Group(*frame_of(self.title, self.progress, self._left_s(), width, height, ascii_only))
