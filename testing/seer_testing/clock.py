"""Contract of the Protocol ``seer_core.ports.engine.Clock``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from seer_core.ports.engine import Clock
from seer_testing.support import run_within

__all__ = ["ClockContract"]


class ClockContract:
    """Tests of a ``Clock``; ``make`` returns a new one, and may be called where an event loop runs."""

    patience_s: float = 30.0
    """Seconds after which a wait has failed."""
    moment_s: float = 0.002
    """A time that the clock passes quickly."""

    def make(self) -> Clock:
        """Return a new clock."""
        raise NotImplementedError("define make(), which returns a new clock")

    def test_it_is_a_clock(self) -> None:
        """It has the methods of the Protocol."""
        assert isinstance(self.make(), Clock)

    def test_callbacks_run_when_due_and_in_order(self) -> None:
        """Time never goes back; what is due at one instant runs in the order of the calls."""

        async def story(clock: Clock) -> None:
            start, seen = clock.now(), list[tuple[str, float]]()
            for name, moments in (("c", 3), ("a", 1), ("b", 2), ("d", 3)):
                self._note(clock, seen, name, start + moments * self.moment_s)
            await self._until(clock, lambda: len(seen) == 4)
            assert [name for name, _ in seen] == ["a", "b", "c", "d"]
            times = [start, *(time for _, time in seen), clock.now()]
            assert times == sorted(times), f"time went back: {times}"
            for (name, time), moments in zip(seen, (1, 2, 3, 3), strict=True):
                # An event loop runs what is due within its clock's resolution.
                assert time >= start + moments * self.moment_s - 1e-3, f"{name} ran before it was due"

        self._play(story)

    def test_a_cancelled_callback_never_runs(self) -> None:
        """Cancelling twice, or after it has run, does nothing."""

        async def story(clock: Clock) -> None:
            seen: list[tuple[str, float]] = []
            cancel = self._note(clock, seen, "cancelled", clock.now() + self.moment_s)
            ran = self._note(clock, seen, "ran", clock.now() + 2 * self.moment_s)
            cancel()
            cancel()
            await self._until(clock, lambda: bool(seen))
            ran()
            assert [name for name, _ in seen] == ["ran"]

        self._play(story)

    def test_what_is_past_runs_at_once_but_not_within_the_call(self) -> None:
        """An engine may ask for it while it holds half a change."""

        async def story(clock: Clock) -> None:
            seen: list[tuple[str, float]] = []
            self._note(clock, seen, "past", clock.now() - 1)
            assert not seen, "ran within call_at"
            await self._until(clock, lambda: bool(seen))

        self._play(story)

    def _note(
        self, clock: Clock, seen: list[tuple[str, float]], name: str, when_s: float
    ) -> Callable[[], None]:
        def run() -> None:
            seen.append((name, clock.now()))
            self._changed.set()

        return clock.call_at(when_s, run)

    async def _until(self, clock: Clock, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            assert await clock.advance(self._changed), "advance() says that nothing will happen, but it will"

    def _play(self, story: Callable[[Clock], Coroutine[Any, Any, None]]) -> None:
        async def play() -> None:
            self._changed = asyncio.Event()
            await story(self.make())

        run_within(self.patience_s, play(), "what was asked for by call_at()")
