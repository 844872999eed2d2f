"""The phases of an iteration: which one is under way, and how many seconds each took."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

__all__ = ["Phases", "ProgressListener"]


class ProgressListener(Protocol):
    """Receives the progress of a run; called in the loop's thread."""

    def phase(self, iteration: int, name: str) -> None:
        """Receive the phase that an iteration enters.

        Phases are evaluation, rollout, sleep, rewards, training, weights and checkpoint.
        """

    def responses(self, finished: int, wanted: int) -> None:
        """Receive how many responses of the rollout have finished."""

    def iterated(self, metrics: Mapping[str, Any]) -> None:
        """Receive the metrics of an iteration that is over."""


class Phases:
    """Measures the phases of the current iteration, and reports each to a listener when it begins."""

    def __init__(self, listener: ProgressListener) -> None:
        self.listener = listener
        self._iteration = 0
        self._seconds: dict[str, float] = {}

    def start(self, iteration: int) -> None:
        """Begin to measure another iteration."""
        self._iteration = iteration
        self._seconds = {}

    def announce(self, name: str) -> None:
        """Report a phase that is not waited for."""
        self.listener.phase(self._iteration, name)

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the time that the ``with`` block takes to a phase, without a report."""
        began = time.monotonic()
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - began

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Report a phase, and measure it."""
        self.announce(name)
        with self.measure(name):
            yield

    def seconds(self) -> dict[str, float]:
        """Return the fields of the metrics: ``rollout_s`` and so on, of the phases that there were."""
        return {f"{name}_s": round(seconds, 3) for name, seconds in self._seconds.items()}
