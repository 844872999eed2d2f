"""Threads beside the steps of a real engine, on an emulated clock."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, ParamSpec, TypeVar

from seer_paced.emulated_clock import EmulatedClock

__all__ = ["INSTANT_S", "EmulatedThread"]

P = ParamSpec("P")
T = TypeVar("T")

INSTANT_S = 1e-9
"""Times that differ by less are one."""


class EmulatedThread(Executor):
    """Does everything at once, and counts it as done when it would be: one after the other.

    ``seconds_of`` returns how long something takes, by its result.
    """

    def __init__(self, time: EmulatedClock, seconds_of: Callable[[Any], float]) -> None:
        self._time = time
        self._seconds_of = seconds_of
        self._ends_s: list[float] = []

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Call ``fn``; the future is done when the emulated time has passed."""
        result = fn(*args, **kwargs)
        now = self._time.now()
        self._ends_s = [end for end in self._ends_s if end > now + INSTANT_S]
        ends_s = max([now, *self._ends_s]) + self._seconds_of(result)
        self._ends_s.append(ends_s)
        done: EmulatedFuture[T] = EmulatedFuture(self._time, ends_s)
        done.set_result(result)
        return done

    def next_s(self) -> float:
        """Return the seconds until the next thing is done, 0 without any."""
        now = self._time.now()
        return min((end - now for end in self._ends_s if end > now + INSTANT_S), default=0.0)


class EmulatedFuture(Future[T]):
    """A result that is there at a time."""

    def __init__(self, time: EmulatedClock, ends_s: float) -> None:
        super().__init__()
        self._time, self._ends_s = time, ends_s

    def done(self) -> bool:
        """Return whether the time has come."""
        return self._time.now() + INSTANT_S >= self._ends_s
