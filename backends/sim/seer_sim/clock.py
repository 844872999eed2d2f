"""Time that jumps: a Clock whose next moment is the next thing due."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush
from typing import Any

__all__ = ["VirtualClock"]

YIELD_EVERY = 256
"""Callbacks between two turns given to asyncio, so that other tasks live."""

SETTLE_TURNS = 8
"""Turns of the event loop after which a task that was set going waits for this clock again."""


_Entry = list[Any]
"""When it is due, whether it is a last one, its number, and the callback; None once it is cancelled."""


def _cancel(entry: _Entry) -> None:
    entry[3] = None


class VirtualClock:
    """Seconds since the clock was made; callbacks run in the order (time, last, call of ``call_at``)."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._heap: list[_Entry] = []
        self._sequence = 0
        self._until_yield = YIELD_EVERY
        self._steps = 0
        self._unsettled = False
        self._holds = 0
        self._free = asyncio.Event()

    def now(self) -> float:
        """Return the virtual time."""
        return self._now_s

    def call_at(
        self, when_s: float, callback: Callable[[], None], *, last: bool = False
    ) -> Callable[[], None]:
        """Run ``callback`` at ``when_s``, or at once if that is past; the function returned cancels it.

        ``last`` callbacks run after every other one of their instant, also those added during it.
        """
        if when_s < self._now_s:
            when_s = self._now_s
        self._sequence = number = self._sequence + 1
        entry = [when_s, last, number, callback]
        heappush(self._heap, entry)
        return partial(_cancel, entry)

    def step(self) -> bool:
        """Jump to the next callback and run it; False if there is none."""
        heap = self._heap
        while heap:
            when_s, _, _, callback = heappop(heap)
            if callback is not None:
                self._now_s = when_s
                self._steps += 1
                callback()
                return True
        return False

    def settle(self) -> None:
        """Let asyncio tasks that the running callback set going act before the next callback."""
        self._unsettled = True

    async def advance(self, changed: asyncio.Event) -> bool:
        """Run callback after callback until ``changed``; False if none is left and no task brings news."""
        while True:
            if self._holds:
                await self._until_free(changed)
            elif self.step():
                self._until_yield -= 1
                if self._until_yield == 0:
                    self._until_yield = YIELD_EVERY
                    await asyncio.sleep(0)
                if self._unsettled:
                    await self._let_others_act()
            else:
                await self._let_others_act()
                if not self._holds:
                    return self.step() or changed.is_set()
            if changed.is_set():
                return True

    def hold(self) -> Callable[[], None]:
        """Let no time pass until the function that is returned has been called; further calls do nothing."""
        held = True
        self._holds += 1
        self._free.clear()

        def release() -> None:
            nonlocal held
            if held:
                held = False
                self._holds -= 1
                if not self._holds:
                    self._free.set()

        return release

    async def _until_free(self, changed: asyncio.Event) -> None:
        waits = [asyncio.ensure_future(event.wait()) for event in (self._free, changed)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def _let_others_act(self) -> None:
        self._unsettled = False
        for _ in range(SETTLE_TURNS):
            await asyncio.sleep(0)

    async def sleep_until(self, when_s: float) -> None:
        """Wait until the clock shows ``when_s``, and move it on if no other task does."""
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
                    if not self._holds:
                        self.step()
                    idle_turns = 0
                steps = self._steps
        finally:
            cancel()
