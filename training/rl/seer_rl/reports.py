"""A page of a training's latest rollouts, written anew after each iteration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import structlog
from seer_cli.report.feed import RunFeed
from seer_cli.report.page import write_page

from seer_core.errors import OutputError
from seer_rl.phases import ProgressListener

__all__ = ["LATEST", "ReportWriter"]

LATEST = 6
"""The rollouts that a page has side by side, those of evaluations among them."""

log = structlog.get_logger("seer")


@attrs.frozen
class ReportWriter:
    """Writes the page when an iteration has ended, and passes progress on; a full disk ends nothing."""

    path: Path
    title: str
    listener: ProgressListener
    feed: RunFeed = attrs.Factory(lambda: RunFeed("rollout", LATEST))

    def phase(self, iteration: int, name: str) -> None:
        """Pass it on."""
        self.listener.phase(iteration, name)

    def responses(self, finished: int, wanted: int) -> None:
        """Pass it on, and read what has happened."""
        self.feed.read()
        self.listener.responses(finished, wanted)

    def iterated(self, metrics: Mapping[str, Any]) -> None:
        """Write the page."""
        try:
            write_page(self.path, self.title, self.feed.runs())
        except OutputError as error:
            log.warning("no_report", reason=str(error))
        self.listener.iterated(metrics)
