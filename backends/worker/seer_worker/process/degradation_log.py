"""Failures of a worker's parts, on their way to the runtime."""

from __future__ import annotations

import threading

from seer_worker.wire import Degraded

__all__ = ["DegradationLog"]

MOST = 32
"""So many failures of one part are reported to the runtime; further ones add nothing."""
LONGEST = 2000
"""Characters of a failure that are kept."""


class DegradationLog:
    """The failures of the part ``what``, until they are taken; each only once.

    Any thread may report; only the worker's own thread takes, for it alone writes to the runtime.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._lock = threading.Lock()
        self._reported: set[str] = set()
        self._kept: list[Degraded] = []

    def report(self, reason: str) -> None:
        """Keep a failure that is new."""
        reason = str(reason)[:LONGEST]
        with self._lock:
            if reason not in self._reported and len(self._reported) < MOST:
                self._reported.add(reason)
                self._kept.append(Degraded(self._what, reason))

    def take(self) -> list[Degraded]:
        """Return the failures that have not been taken yet."""
        with self._lock:
            kept, self._kept = self._kept, []
        return kept
