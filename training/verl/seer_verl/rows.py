"""Rows of verl's batches, and the groups of Seer's that they are responses of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass

__all__ = ["ROW", "BatchRow", "Names", "iteration_of", "places"]


@dataclass
class BatchRow:
    """The response ``index`` of a group, and how often it was written on: more than once with tools."""

    group: str
    index: int
    iteration: int
    turns: int = 0


ROW: ContextVar[BatchRow | None] = ContextVar("ROW", default=None)
"""The row whose agent loop is running; each has a task of its own."""


def iteration_of(step: int, validate: bool) -> int:
    """Return what enters the seeds besides a group's name: the step, but all validations are alike."""
    return 0 if validate else max(step, 0)


class Names:
    """Names groups by step and place, from which their seeds follow; verl's own names are drawn at random.

    Batches of one step count on.  Validation begins anew at every step, with the same names.
    """

    def __init__(self) -> None:
        self._now: tuple[int, bool] | None = None
        self._given = 0

    def take(self, count: int, step: int, validate: bool) -> list[str]:
        """Return the names of the next ``count`` groups."""
        if self._now != (step, validate):
            self._now, self._given = (step, validate), 0
        first = self._given
        self._given += count
        prefix = "val" if validate else str(step)
        return [f"{prefix}-{number}" for number in range(first, first + count)]


def places(keys: Iterable[Hashable]) -> list[tuple[int, int]]:
    """Return for each row the number of its group and its index in there; rows of one key are a group."""
    groups: dict[Hashable, int] = {}
    sizes: Counter[int] = Counter()
    found = []
    for key in keys:
        group = groups.setdefault(key, len(groups))
        found.append((group, sizes[group]))
        sizes[group] += 1
    return found
