"""The watch over a cluster's head: whether it answers, and which nodes it is about to lose."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress

import structlog

__all__ = ["SILENT_S", "Watch"]

log = structlog.get_logger("seer")

INTERVAL_S = 1.0
SILENT_S = 5.0
"""A head that has not answered for so long counts as gone, until it answers again."""


class Watch:
    """Asks the head every second, in a thread of its own, because the call blocks when the head is gone.

    ``ask`` returns the ids of the nodes that are being drained.  A head that was gone for the watch
    ``before`` this one still is, until it answers.
    """

    def __init__(self, ask: Callable[[], Collection[str]], before: Watch | None = None) -> None:
        self._ask = ask
        self._ended = threading.Event()
        self._ended_s: float | None = None
        self._answered_s: float = (
            before._answered_s if before is not None and before.silent_s else time.monotonic()
        )
        self._loop = asyncio.get_running_loop()
        self._notices: dict[str, asyncio.Event] = {}
        threading.Thread(target=self._run, name="seer-ray-watch", daemon=True).start()

    def notice(self, node_id: str) -> asyncio.Event:
        """Return an event that is set once the node is being drained."""
        return self._notices.setdefault(node_id, asyncio.Event())

    @property
    def silent_s(self) -> float:
        """How long the head has been gone; 0 while it answers."""
        silent_s = (self._ended_s or time.monotonic()) - self._answered_s
        return silent_s if silent_s >= SILENT_S else 0.0

    def end(self) -> None:
        """Ask no more."""
        self._ended_s = time.monotonic()
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.wait(INTERVAL_S):
            try:
                draining = self._ask()
            except Exception as error:  # Ray has many kinds, some of them no RayError
                log.debug("ray_head_refuses", error=str(error))
                continue
            if self.silent_s:
                log.info("ray_head_answers", silent_s=round(self.silent_s, 1))
            self._answered_s = time.monotonic()
            if draining:
                with suppress(RuntimeError):  # the loop is closed
                    self._loop.call_soon_threadsafe(self._notify, draining)

    def _notify(self, draining: Collection[str]) -> None:
        for node_id in draining:
            self.notice(node_id).set()
