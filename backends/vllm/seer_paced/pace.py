"""The emulated accelerator's time: slept, or only counted."""

from __future__ import annotations

import time
from typing import Protocol

import attrs
from seer_sim.clock import VirtualClock

__all__ = ["Overrun", "Pace", "RealPace", "VirtualPace"]


class Pace(Protocol):
    """Lets emulated seconds pass."""

    def now(self) -> float:
        """Return the emulated time in seconds."""
        ...

    def begin(self) -> None:
        """A step begins."""
        ...

    def spend(self, seconds: float) -> None:
        """Let the step under way take so many emulated seconds longer."""
        ...


class VirtualPace:
    """Counts on from a virtual clock, which stands still while a step is computed."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self.step_s = 0.0
        """What the step under way has taken so far."""

    def now(self) -> float:
        """Return the virtual time."""
        return self._clock.now() + self.step_s

    def begin(self) -> None:
        """Begin a step."""
        self.step_s = 0.0

    def spend(self, seconds: float) -> None:
        """Count."""
        self.step_s += seconds


@attrs.frozen
class Overrun:
    """How well an emulated pace was kept: of ``steps``, ``late`` ended later than they should have.

    ``late_s`` is by how much in all, in emulated seconds, of ``paced_s``.
    """

    steps: int
    late: int
    late_s: float
    paced_s: float

    @property
    def share(self) -> float:
        """By what part of the emulated time steps were late."""
        return self.late_s / self.paced_s if self.paced_s else 0.0


class RealPace:
    """Sleeps: ``speed`` emulated seconds pass in a real one.

    A step ends when its time, counted from its begin, is over.  If the host alone took longer, the step is
    late, and nothing makes up for it: what follows is later too, as on a slower accelerator.
    """

    def __init__(self, speed: float) -> None:
        self._speed = speed
        self._ends_s = 0.0
        self._steps = self._late = 0
        self._late_s = self._paced_s = 0.0
        self._is_late = False

    def now(self) -> float:
        """Return emulated seconds since some epoch."""
        return time.perf_counter() * self._speed

    def begin(self) -> None:
        """Begin a step."""
        self._steps += 1
        self._is_late = False
        self._ends_s = time.perf_counter()

    def spend(self, seconds: float) -> None:
        """Sleep until the step's time is over, and note if it is already."""
        self._paced_s += seconds
        self._ends_s += seconds / self._speed
        left_s = self._ends_s - time.perf_counter()
        if left_s > 0:
            time.sleep(left_s)
        late_s = time.perf_counter() - self._ends_s
        if late_s > 0:
            self._late_s += late_s * self._speed
            self._late += not self._is_late
            self._is_late = True
            self._ends_s += late_s

    def overrun(self) -> Overrun:
        """Return how well the pace was kept so far."""
        return Overrun(self._steps, self._late, self._late_s, self._paced_s)
