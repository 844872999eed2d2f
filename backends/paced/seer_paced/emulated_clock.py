"""The emulated accelerator's time: slept, or only counted."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import attrs

__all__ = ["CountingClock", "EmulatedClock", "Overrun", "SleepingClock"]


@attrs.frozen
class Overrun:
    """How far steps fell behind: of ``steps``, ``late`` ended later than they should have.

    What later steps did not make up for is ``lost_s``, of ``emulated_s``, both in emulated seconds.
    """

    steps: int
    late: int
    lost_s: float
    emulated_s: float

    @property
    def share(self) -> float:
        """By what part the emulated time is longer than it should be."""
        return self.lost_s / self.emulated_s if self.emulated_s else 0.0


class EmulatedClock(Protocol):
    """Lets emulated seconds pass, step by step."""

    def now(self) -> float:
        """Return the emulated time in seconds."""
        ...

    def begin_step(self) -> None:
        """Take note that a step begins now."""
        ...

    def idle(self) -> None:
        """Take note that nothing is left to do until the next step begins."""
        ...

    def spend(self, seconds: float) -> None:
        """Let the step under way take so many emulated seconds longer."""
        ...

    def admit(self, request_ids: Sequence[str]) -> None:
        """Take note of the requests that the step under way has let in, again or anew."""
        ...

    def overrun(self) -> Overrun | None:
        """Return how far steps fell behind so far; None where time cannot run away."""
        ...


class CountingClock:
    """Counts on from a virtual time, which stands still while a step is computed."""

    def __init__(self) -> None:
        self.clock_s = 0.0
        """The time on the virtual clock."""
        self.step_s = 0.0
        """What the step under way has taken so far."""
        self.admitted: list[str] = []
        """The requests that the step under way has let in."""

    def now(self) -> float:
        """Return the virtual time."""
        return self.clock_s + self.step_s

    def begin_step(self) -> None:
        """Count from zero again."""
        self.step_s = 0.0
        self.admitted = []

    def idle(self) -> None:
        """Do nothing: the clock stands still by itself."""

    def spend(self, seconds: float) -> None:
        """Add to the time of the step under way."""
        self.step_s += seconds

    def admit(self, request_ids: Sequence[str]) -> None:
        """Keep them."""
        self.admitted = list(request_ids)

    def overrun(self) -> None:
        """Return None: a step takes no time of the machine's."""


class SleepingClock:
    """Sleeps: ``speed`` emulated seconds pass in a real one.

    A step ends at the end of the one before it plus what it takes, so what the process does between two steps
    counts, and a late step is made up for by those after it as long as the machine is fast enough at all.
    """

    def __init__(self, speed: float) -> None:
        self._speed = speed
        self._ends_s = self._debt_s = self._lost_s = self._emulated_s = 0.0
        self._steps = self._late = 0
        self._idle = True

    def now(self) -> float:
        """Return emulated seconds since some epoch."""
        return time.perf_counter() * self._speed

    def begin_step(self) -> None:
        """Begin a step; after an idle time, with nothing to make up for."""
        self._late += self._debt_s > 0
        self._steps += 1
        if self._idle:
            self._lost_s += self._debt_s
            self._debt_s = 0.0
            self._ends_s = time.perf_counter()
            self._idle = False

    def idle(self) -> None:
        """Let the time until the next step count for nothing."""
        self._idle = True

    def spend(self, seconds: float) -> None:
        """Sleep until the step's time is over, and note how late that is."""
        self._emulated_s += seconds
        self._ends_s += seconds / self._speed
        left_s = self._ends_s - time.perf_counter()
        if left_s > 0:
            time.sleep(left_s)
        self._debt_s = max(0.0, -left_s)  # not what the machine overslept: the next step makes up for it

    def admit(self, request_ids: Sequence[str]) -> None:
        """Do nothing: the runtime's own times say when a request began."""

    def overrun(self) -> Overrun:
        """Return how far steps fell behind so far."""
        lost_s = (self._lost_s + self._debt_s) * self._speed
        return Overrun(self._steps, self._late, lost_s, self._emulated_s)
