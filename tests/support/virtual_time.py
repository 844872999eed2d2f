"""Event loops whose time jumps, so that limits take no time and a busy machine passes none."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

from tests.support import patience

__all__ = ["SkippedTime", "VirtualTime", "later", "run_in_virtual_time"]

T = TypeVar("T")


class VirtualTime(asyncio.SelectorEventLoop):
    """Time that stands still while anything is ready to run, and then jumps to the next timer.

    It does not see threads and other processes at work: ``await aeventually(...)`` until they have acted,
    and no time passes meanwhile.
    """

    def __init__(self) -> None:
        self._now_s = 0.0
        super().__init__(_Jumping(self.pass_s))

    def time(self) -> float:
        """Return the virtual time in seconds, which begins at 0."""
        return self._now_s

    def pass_s(self, seconds: float) -> None:
        """Let time pass at once, as for a loop whose thread does something else."""
        self._now_s += seconds


class _Jumping(selectors.DefaultSelector):
    """A selector that calls ``jump`` with the seconds that it would have waited in vain."""

    def __init__(self, jump: Any) -> None:
        super().__init__()
        self._jump = jump

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return the events that are there; without a timer there must be one some day."""
        if timeout is None:
            found = super().select(patience.PATIENCE_S)
            if not found:
                raise AssertionError(f"nothing happened for {patience.PATIENCE_S:g} s, and no timer is set")
            return found
        found = super().select(0)
        if not found and timeout > 0:
            self._jump(timeout)
        return found


class SkippedTime(asyncio.SelectorEventLoop):
    """The machine's time, of which a test may skip some: timers that become due then run next."""

    _skipped_s = 0.0

    def time(self) -> float:
        """Return the time in seconds, with all that was skipped."""
        return super().time() + self._skipped_s

    def skip_s(self, seconds: float) -> None:
        """Let so many seconds be over."""
        self._skipped_s += seconds


async def later(seconds: float) -> None:
    """Return after so many seconds of virtual time."""
    assert isinstance(asyncio.get_running_loop(), VirtualTime), "it would take as long"
    await asyncio.sleep(seconds)


def run_in_virtual_time(story: Coroutine[Any, Any, T]) -> T:
    """Return what a coroutine returns, run on an event loop of its own whose time jumps."""
    with asyncio.Runner(loop_factory=VirtualTime) as runner:
        return runner.run(story)
