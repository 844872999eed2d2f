"""The counts of a store, on their way to the pool."""

from __future__ import annotations

import threading
from collections import Counter

__all__ = ["Counts"]


class Counts:
    """Counts by name, until they are taken; Mooncake's thread counts too."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counted: Counter[str] = Counter()

    def add(self, **counted: int) -> None:
        """Add to a count."""
        with self._lock:
            self._counted.update(counted)

    def take(self) -> dict[str, int]:
        """Return what has been counted since the last call."""
        with self._lock:
            counted, self._counted = self._counted, Counter()
        return {name: count for name, count in counted.items() if count}
