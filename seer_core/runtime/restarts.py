"""How often instances are started again, and the restarts that are left to each."""

from __future__ import annotations

from collections import deque
from typing import Annotated

import attrs
from msgspec import Meta, Struct

from seer_core.plugins.config_types import NotNegative, Positive

__all__ = ["RestartBudget", "RestartsTable"]

LONGEST_PAUSE_S = 60.0
MOST_DOUBLINGS = 64
"""A pause is no longer doubled then; with more, a float would overflow."""


class RestartsTable(Struct, frozen=True):
    """``[seer.restarts]``: how often, and how soon, a lost instance is started again."""

    attempts: Annotated[int, Meta(ge=0)] = 3
    """An instance that is lost more often than this within ``window_s`` stays down."""
    window_s: Positive = 600.0
    """The seconds of an instance's work within which its losses are counted."""
    backoff_s: NotNegative = 1.0
    """The wait before the second restart within the window. The first comes at once; each further one waits
    twice as long.
    """


@attrs.define(eq=False)
class Life:
    """One instance: its seconds of work, the start of its present life, and its work at each restart."""

    worked_s: float = 0.0
    up_since_s: float | None = None
    restarts: deque[float] = attrs.Factory(deque)


class RestartBudget:
    """Grants restarts as ``[seer.restarts]`` allows, with pauses of at most a minute before them.

    The window counts seconds of work alone, so that an instance whose starts fail slowly is given up as well.
    """

    def __init__(self, policy: RestartsTable) -> None:
        self._policy = policy
        self._lives: dict[str, Life] = {}

    def started(self, name: str, now: float) -> None:
        """Note that an instance works."""
        self._lives.setdefault(name, Life()).up_since_s = now

    def lost(self, name: str, now: float) -> None:
        """Note that an instance has stopped working."""
        life = self._lives[name]
        assert life.up_since_s is not None
        life.worked_s += now - life.up_since_s
        life.up_since_s = None

    def forget(self, name: str) -> None:
        """Drop an instance; a later one of that name has all its restarts."""
        self._lives.pop(name, None)

    def take(self, name: str) -> float | None:
        """Take a restart of an instance that is down: the seconds to wait before it, None if none is left."""
        life = self._lives.setdefault(name, Life())
        while life.restarts and life.restarts[0] <= life.worked_s - self._policy.window_s:
            life.restarts.popleft()
        before = len(life.restarts)
        if before >= self._policy.attempts:
            return None
        life.restarts.append(life.worked_s)
        doublings = min(before - 1, MOST_DOUBLINGS)
        return min(LONGEST_PAUSE_S, self._policy.backoff_s * 2.0**doublings) if before else 0.0
