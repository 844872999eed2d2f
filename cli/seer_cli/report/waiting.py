"""For how long waiting requests lacked a slot, KV, their turn, an instance, or a rollout that goes on."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from seer_trace.chunk_runs import Cause

__all__ = ["CAUSES", "WaitingTimes"]

CAUSES: tuple[Cause, ...] = ("slots", "kv", "turn", "paused", "instances")
CODES: Mapping[Cause, int] = {"slots": -1, "paused": -2, "instances": -3}
MOST_NEEDS = 64
"""The most sizes of KV that are kept apart; further ones count as the next larger."""

ROUNDING_S = 1e-9

Floats = npt.NDArray[np.float64]


class WaitingTimes:
    """The state of all instances over time, and the times in which requests waited.

    ``note`` is called whenever the state changes, with the most KV that an instance with a free slot has, in
    tokens, or with the cause that lets no request run; ``wait`` with each time in which a request waited.
    """

    def __init__(self) -> None:
        self._times_s, self._states = array("d"), array("d")
        self._begins_s, self._ends_s = array("d"), array("d")
        self._needs, self._rows = array("d"), array("q")
        self._known: tuple[Floats, Floats] = (np.array([]), np.array([]))

    def note(self, now: float, state: Cause | int) -> None:
        """Note the state from now on."""
        value = float(state if isinstance(state, int) else CODES[state])
        if not self._states or self._states[-1] != value:
            self._times_s.append(now)
            self._states.append(value)

    def wait(self, row: int, begin_s: float, end_s: float, need: int) -> None:
        """Note that the request of this row waited for so much KV, in tokens."""
        if end_s > begin_s:
            self._rows.append(row)
            self._begins_s.append(begin_s)
            self._ends_s.append(end_s)
            self._needs.append(need)

    def causes_s(self, begin_s: float, end_s: float, need: int) -> dict[Cause, float]:
        """Return for how long a request that needed so much KV lacked what between two times."""
        times_s, states = self._states_over_time()
        # The state at the beginning is that of the last time before it.
        within = slice(
            max(0, int(np.searchsorted(times_s, begin_s, side="right")) - 1),
            int(np.searchsorted(times_s, end_s, side="right")),
        )
        wait = (np.array([each], float) for each in (begin_s, end_s, need))
        one = _causes_s(times_s[within], states[within], *wait)[0]
        return {cause: float(seconds) for cause, seconds in zip(CAUSES, one, strict=True) if seconds > 0}

    def by_request(self, rows: int, going_on: Sequence[tuple[int, float, float, int]] = ()) -> Floats:
        """Return the seconds that each request waited, as (rows, causes).

        ``going_on`` are waits that have not ended: the arguments of ``wait``, up to now.
        """
        own: Floats = np.array([self._rows, self._begins_s, self._ends_s, self._needs], np.float64)
        waits = np.concatenate([own, np.array(going_on, np.float64).reshape(-1, 4).T], axis=1)
        found = np.zeros((rows, len(CAUSES)))
        np.add.at(found, waits[0].astype(np.int64), _causes_s(*self._states_over_time(), *waits[1:]))
        return found

    def _states_over_time(self) -> tuple[Floats, Floats]:
        """Return when each state began, and the states."""
        if len(self._known[0]) != len(self._times_s):
            self._known = np.array(self._times_s), np.array(self._states)
        return self._known


def _causes_s(times_s: Floats, states: Floats, begins_s: Floats, ends_s: Floats, needs: Floats) -> Floats:
    """Return the seconds of each wait, as (waits, causes)."""
    found = np.zeros((len(needs), len(CAUSES)))
    if not len(needs) or not len(times_s):
        return found
    for cause, code in CODES.items():
        found[:, CAUSES.index(cause)] = _between(times_s, states == code, begins_s, ends_s)
    sizes = np.unique(needs)
    if len(sizes) > MOST_NEEDS:
        sizes = np.unique(np.quantile(sizes, np.linspace(0, 1, MOST_NEEDS), method="higher"))
    size_of = np.searchsorted(sizes, needs)
    for number, size in enumerate(sizes):
        mine = size_of == number
        spans = begins_s[mine], ends_s[mine]
        found[mine, CAUSES.index("turn")] = _between(times_s, states >= size, *spans)
    with_a_slot = _between(times_s, states >= 0, begins_s, ends_s)
    rest_s = with_a_slot - found[:, CAUSES.index("turn")]
    found[:, CAUSES.index("kv")] = np.where(rest_s > ROUNDING_S, rest_s, 0.0)
    return found


def _between(times_s: Floats, holds: npt.NDArray[np.bool_], begins_s: Floats, ends_s: Floats) -> Floats:
    """Return for how long a state held between two times; states hold from their time to the next."""
    until = np.concatenate([[0.0], np.cumsum(np.diff(times_s) * holds[:-1])])

    def so_far(at: Floats) -> Floats:
        last = np.clip(np.searchsorted(times_s, at, side="right") - 1, 0, None)
        held: Floats = until[last] + np.maximum(at - times_s[last], 0.0) * holds[last]
        return held

    return so_far(ends_s) - so_far(begins_s)
