"""How often, and how soon, a lost instance is started again."""

from __future__ import annotations

from collections import deque

import attrs

__all__ = ["RestartBudget"]

LONGEST_PAUSE_S = 60.0


@attrs.define(eq=False)
class Life:
    """One instance: the seconds it has worked, since when it does, and what it had worked at each restart."""

    worked_s: float = 0.0
    up_since_s: float | None = None
    restarts: deque[float] = attrs.Factory(deque)


class RestartBudget:
    """At most ``most`` restarts of an instance within ``window_s`` seconds of its work.

    Time in which it is down does not count, so that one whose starts fail slowly is given up as well.  The
    first restart within the window comes at once, the next after ``backoff_s``, each further one after
    twice as long, and none after more than a minute.
    """

    def __init__(self, most: int, window_s: float, backoff_s: float) -> None:
        self._most, self._window_s, self._backoff_s = most, window_s, backoff_s
        self._lives: dict[str, Life] = {}

    def started(self, name: str, now: float) -> None:
        """Note that an instance works."""
        self._lives.setdefault(name, Life()).up_since_s = now

    def lost(self, name: str, now: float) -> None:
        """Note that it no longer does."""
        life = self._lives[name]
        assert life.up_since_s is not None
        life.worked_s += now - life.up_since_s
        life.up_since_s = None

    def forget(self, name: str) -> None:
        """Forget an instance; one of that name that starts later has all its restarts."""
        self._lives.pop(name, None)

    def take(self, name: str) -> float | None:
        """Take a restart of an instance that is down: the seconds to wait before it, None if none is left."""
        life = self._lives[name]
        while life.restarts and life.restarts[0] <= life.worked_s - self._window_s:
            life.restarts.popleft()
        before = len(life.restarts)
        if before >= self._most:
            return None
        life.restarts.append(life.worked_s)
        return min(LONGEST_PAUSE_S, self._backoff_s * 2.0 ** (before - 1)) if before else 0.0
