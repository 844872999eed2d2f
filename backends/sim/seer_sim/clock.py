"""Time that jumps: a Clock whose next moment is the next thing due."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from heapq import heappop, heappush

__all__ = ["VirtualClock"]

YIELD_EVERY = 256
"""Callbacks between two turns given to asyncio, so that other tasks live."""

SETTLE_TURNS = 8
"""Turns of the event loop after which a task that was set going waits for this clock again."""


class _Entry:
    """A callback on the heap; a cancelled one has none."""

    __slots__ = ("callback",)

    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None


class VirtualClock:
    """Seconds since the clock was made; callbacks run in the order (time, last, call of ``call_at``)."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._heap: list[tuple[float, bool, int, _Entry]] = []
        self._sequence = 0
        self._until_yield = YIELD_EVERY
        self._steps = 0
        self._unsettled = False

    def now(self) -> float:
        """Return the virtual time."""
        return self._now_s

    def call_at(
        self, when_s: float, callback: Callable[[], None], *, last: bool = False
    ) -> Callable[[], None]:
        """Run ``callback`` at ``when_s``, or at once if that is past; the function returned cancels it.

        ``last`` callbacks run after every other one of their instant, also those added during it.
        """
        when_s = max(when_s, self._now_s)
        self._sequence += 1
        entry = _Entry(callback)
        heappush(self._heap, (when_s, last, self._sequence, entry))
        return entry.cancel

    def step(self) -> bool:
        """Jump to the next callback and run it; False if there is none."""
        while self._heap:
            when_s, _, _, entry = heappop(self._heap)
            if entry.callback is not None:
                self._now_s = when_s
                self._steps += 1
                entry.callback()
                return True
        return False

    def settle(self) -> None:
        """Let asyncio tasks that the running callback set going act before the next callback."""
        self._unsettled = True

    async def advance(self, changed: asyncio.Event) -> bool:
        """Jump to the next callback and run it; False if there is none and no task brings news."""
        self._until_yield -= 1
        if self._until_yield == 0:
            self._until_yield = YIELD_EVERY
            await asyncio.sleep(0)
        stepped = self.step()
        if self._unsettled or not stepped:
            self._unsettled = False
            for _ in range(SETTLE_TURNS):
                await asyncio.sleep(0)
        return stepped or self.step() or changed.is_set()

    async def sleep_until(self, when_s: float) -> None:
        """Wait until the clock shows ``when_s``, and move it on if nobody else does."""
        due = False

        def wake() -> None:
            nonlocal due
            due = True
            self.settle()

        cancel = self.call_at(when_s, wake)
        steps, idle_turns = self._steps, 0
        try:
            while not due:
                await asyncio.sleep(0)
                idle_turns = idle_turns + 1 if steps == self._steps else 0
                # Twice as long as ``advance`` itself may pause.
                if idle_turns == 2 * SETTLE_TURNS:
                    self.step()
                    idle_turns = 0
                steps = self._steps
        finally:
            cancel()
