"""Rows of verl's batches, and the groups of Seer's that they are responses of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

__all__ = ["ROW", "BatchRow", "Names", "iteration_of", "places", "reserved_record", "step_of"]

SINGLE_TURN = "single_turn_agent"
"""verl's agent loop that asks for one turn of a row; others may ask for more."""

VALIDATION = "val"
"""With it the names of validation's groups begin."""


@dataclass
class BatchRow:
    """The response ``index`` of a group, which is written by an agent loop of verl's, in ``turns`` so far."""

    group: str
    index: int
    iteration: int
    agent: str = SINGLE_TURN
    turns: int = 0
    batch: str = ""
    """The batch that its group was named with, where verl's engines are its own; empty without Seer."""
    without: bool = False
    """Whether a turn of it has been written without Seer."""
    never_written: Sequence[int] = ()
    """The tokens of images and videos, which stand for nothing where a response has them: verl's trainer
    would look for an image behind each, so its own servers do not write them.
    """

    def next_turn(self) -> dict[str, Any]:
        """Return the record of its next turn without its prompt; what tools answer differs by the row."""
        name = f"{self.group}-{self.index}-{self.turns}"
        return _record(name, self.group, [self.index], self.agent)


def reserved_record(group: str, n: int, agent: str) -> dict[str, Any]:
    """Return the record of a reserved group; the KV of its rows is kept where ``agent`` may add turns."""
    return _record(group, group, range(n), agent)


def _record(name: str, group: str, rows: Sequence[int], agent: str) -> dict[str, Any]:
    """Return the record of a turn of some rows of a group."""
    record: dict[str, Any] = {"group_id": name, "n": len(rows)}
    if agent != SINGLE_TURN:
        record |= {"family": group, "trajectories": [f"{group}-{row}" for row in rows]}
    return record


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
        prefix = VALIDATION if validate else str(step)
        return [f"{prefix}-{number}" for number in range(first, first + count)]


def step_of(names: Iterable[str]) -> str:
    """Return what a report of groups of these names is called."""
    prefix = next(iter(names), "").rpartition("-")[0]
    return "validation" if prefix == VALIDATION else f"step-{prefix}"


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
