"""The clock of live engines: the machine's own time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

__all__ = ["RealClock"]


class RealClock:
    """Seconds on the event loop's monotonic clock, counted from the first call of ``now``."""

    def __init__(self) -> None:
        self._epoch: float | None = None

    def now(self) -> float:
        """Seconds since the first call."""
        time = asyncio.get_running_loop().time()
        if self._epoch is None:
            self._epoch = time
        return time - self._epoch

    def call_at(self, when_s: float, callback: Callable[[], None]) -> Callable[[], None]:
        """Run ``callback`` at ``when_s`` on the event loop."""
        self.now()
        assert self._epoch is not None
        return asyncio.get_running_loop().call_at(self._epoch + when_s, callback).cancel

    async def advance(self, changed: asyncio.Event) -> bool:
        """Wait until something has changed; live engines may send a message at any time."""
        await changed.wait()
        return True
