"""What parts of a worker complain of, on its way to the runtime."""

from __future__ import annotations

import threading

from seer_host.wire import Troubled

__all__ = ["Troubles"]

MOST = 32
"""So many complaints of one part reach the runtime; whoever has more is broken, and has said so."""
LONGEST = 2000
"""Characters of a complaint that are kept."""


class Troubles:
    """The complaints of the part ``what``, until they are taken; each only once.

    Any thread may tell; the worker's own takes, for it alone writes to the runtime.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._lock = threading.Lock()
        self._told: set[str] = set()
        self._kept: list[Troubled] = []

    def tell(self, reason: str) -> None:
        """Keep a complaint that is new."""
        reason = str(reason)[:LONGEST]
        with self._lock:
            if reason not in self._told and len(self._told) < MOST:
                self._told.add(reason)
                self._kept.append(Troubled(self._what, reason))

    def take(self) -> list[Troubled]:
        """Return the complaints that nobody has taken yet."""
        with self._lock:
            kept, self._kept = self._kept, []
        return kept
