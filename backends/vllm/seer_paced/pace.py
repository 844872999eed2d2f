"""The emulated accelerator's time: slept, or only counted."""

from __future__ import annotations

import time
from typing import Protocol

import attrs

__all__ = ["Overrun", "Pace", "RealPace", "VirtualPace"]


class Pace(Protocol):
    """Lets emulated seconds pass."""

    def now(self) -> float:
        """Return the emulated time in seconds."""
        ...

    def begin(self) -> None:
        """A step begins."""
        ...

    def rest(self) -> None:
        """There is nothing to do until the next step begins."""
        ...

    def spend(self, seconds: float) -> None:
        """Let the step under way take so many emulated seconds longer."""
        ...


class VirtualPace:
    """Counts on from a virtual time, which stands still while a step is computed."""

    def __init__(self) -> None:
        self.clock_s = 0.0
        """The time on the clock, as whoever keeps it says."""
        self.step_s = 0.0
        """What the step under way has taken so far."""

    def now(self) -> float:
        """Return the virtual time."""
        return self.clock_s + self.step_s

    def begin(self) -> None:
        """Begin a step."""
        self.step_s = 0.0

    def rest(self) -> None:
        """Do nothing: the clock stands still by itself."""

    def spend(self, seconds: float) -> None:
        """Count."""
        self.step_s += seconds


@attrs.frozen
class Overrun:
    """How well a pace was kept: of ``steps``, ``late`` ended later than they should have.

    What later steps did not make up for is ``lost_s``, of ``paced_s``, both in emulated seconds.
    """

    steps: int
    late: int
    lost_s: float
    paced_s: float

    @property
    def share(self) -> float:
        """By what part the emulated time is longer than it should be."""
        return self.lost_s / self.paced_s if self.paced_s else 0.0


class RealPace:
    """Sleeps: ``speed`` emulated seconds pass in a real one.

    A step ends at the end of the one before it plus what it takes, so what the host does between two steps
    counts, and a late step is made up for by those after it as long as the host can keep the pace at all.
    """

    def __init__(self, speed: float) -> None:
        self._speed = speed
        self._ends_s = self._debt_s = self._lost_s = self._paced_s = 0.0
        self._steps = self._late = 0
        self._resting = True

    def now(self) -> float:
        """Return emulated seconds since some epoch."""
        return time.perf_counter() * self._speed

    def begin(self) -> None:
        """Begin a step; after a rest, with nothing to make up for."""
        self._count_late()
        self._steps += 1
        if self._resting:
            self._lost_s += self._debt_s
            self._debt_s = 0.0
            self._ends_s = time.perf_counter()
            self._resting = False

    def rest(self) -> None:
        """Let the time until the next step count for nothing."""
        self._resting = True

    def spend(self, seconds: float) -> None:
        """Sleep until the step's time is over, and note how late that is."""
        self._paced_s += seconds
        self._ends_s += seconds / self._speed
        left_s = self._ends_s - time.perf_counter()
        if left_s > 0:
            time.sleep(left_s)
        self._debt_s = max(0.0, -left_s)  # not what the machine overslept: the next step makes up for it

    def overrun(self) -> Overrun:
        """Return how well the pace was kept so far."""
        return Overrun(self._steps, self._late, (self._lost_s + self._debt_s) * self._speed, self._paced_s)

    def _count_late(self) -> None:
        self._late += self._debt_s > 0
