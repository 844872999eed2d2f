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
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from seer_cli.progress import InstanceLine, RunProgress
from seer_core.errors import printable
from seer_core.model.events import Command, Event
from seer_core.ports.policy import Observer
from seer_core.scheduling.scheduler import CORE, Slot

__all__ = ["Display"]

LINE_EVERY_S = 5.0
FRAME_EVERY_S = 0.25
SHOWN_ID = 60
"""Characters shown of an instance's id or of a title."""
SHOWN_MISSING = 160
"""Characters shown of what an instance that is down waits for."""


class Display(Observer):
    """Shows a rollout on standard error while it runs; an observer and a context manager.

    Without a terminal it prints a line every few seconds, so that a log file stays readable.
    """

    def __init__(self, title: str, stream: TextIO | None = None) -> None:
        self.title = printable(title, SHOWN_ID)
        self.progress = RunProgress()
        self._console = Console(
            file=stream or sys.stderr, highlight=False, markup=False, emoji=False, soft_wrap=True
        )
        self._live = (
            # No thread of its own: what it shows changes only in ``observe``.
            Live(get_renderable=self._render, console=self._console, auto_refresh=False, transient=True)
            if self._console.is_terminal
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
        else:
            self._console.print(self._headline(), *self._instance_notes(), sep="  ")

    def _headline(self) -> str:
        progress = self.progress
        length = progress.acceptance_length
        drafts = "" if length is None else f"  {length:.2f} tok/step"
        degradations = f"  TROUBLES {progress.degradations}" if progress.degradations else ""
        return (
            f"{self.title}: groups {progress.groups_done}/{progress.groups}"
            f"  requests {progress.requests_done}/{progress.requests}"
            f"  tokens {progress.tokens:,}  {progress.tokens_per_s:,.0f} tok/s"
            f"{drafts}{degradations}  left {_duration(self._left_s())}"
        )

    def _left_s(self) -> float | None:
        """Estimate the time left in real seconds, also where the run's clock is a simulated one."""
        left_s, started_s = self.progress.left_s, self.progress.started_s
        if left_s is None or started_s is None or self.progress.now <= started_s:
            return None
        return left_s * (time.monotonic() - self._began_s) / (self.progress.now - started_s)

    def _instance_notes(self) -> list[str]:
        return [
            f"{printable(line.id, SHOWN_ID)} kv {line.kv_usage:.0%} run {line.running} queue {line.waiting}"
            if line.alive
            else f"{printable(line.id, SHOWN_ID)} {_fate(line)}"
            for line in self.progress.instances.values()
        ]

    def _render(self) -> Group:
        table = Table.grid(padding=(0, 2))
        down = []
        nodes = {line.node for line in self.progress.instances.values() if line.alive}
        for line in self.progress.instances.values():
            if line.alive:
                table.add_row(
                    printable(line.id, SHOWN_ID),
                    ProgressBar(total=1.0, completed=line.kv_usage, width=24),
                    f"KV {line.kv_usage:4.0%}",
                    f"running {line.running}",
                    f"queued {line.waiting}",
                    f"drafting {line.drafting_s / line.stepping_s:.1%}" if line.drafting_s else "",
                    f"on {printable(line.node, SHOWN_ID)}" if len(nodes) > 1 else "",
                )
            else:
                down.append(Text(f"{printable(line.id, SHOWN_ID)}  {_fate(line)}", style="red"))
        return Group(Text(self._headline(), style="bold"), table, *down)


def _fate(line: InstanceLine) -> str:
    if line.failed:
        return "given up"
    return f"waits: {printable(line.missing, SHOWN_MISSING)}" if line.missing else "lost, restarting"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
