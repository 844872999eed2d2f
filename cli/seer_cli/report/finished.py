"""Sums over the chunks that brought tokens, added up some thousand at a time."""

from __future__ import annotations

from array import array

import attrs
import numpy as np
import numpy.typing as npt
from seer_trace.chunk_runs import ChunkRun

from seer_cli.report.bins import TimeBins
from seer_cli.report.lanes import InstanceLane
from seer_core.model.events import ChunkFinished

__all__ = ["DraftCounts", "FinishedChunks"]

FIGURES = (
    *("lane", "begin_s", "end_s", "age", "siblings", "moved"),
    *("tokens", "steps", "drafted", "accepted", "cached", "pool", "prefilled", "again"),
)
CHUNKS_AT_ONCE = 4096
LANES_AT_ONCE = 64
"""For so many instances more, so many chunks more wait until they are added up."""

Columns = dict[str, npt.NDArray[np.float64]]


@attrs.define
class DraftCounts:
    """Steps of chunks, and their drafts."""

    steps: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0


@attrs.define(eq=False)
class FinishedChunks:
    """Sums over finished chunks; they are those of all chunks after ``catch_up``."""

    chunks: int = 0
    tokens: int = 0
    migrations: int = 0
    cached_tokens: int = 0
    pool_tokens: int = 0
    prefilled_tokens: int = 0
    again_tokens: int = 0
    """Context that a chunk prefilled though an earlier chunk of the request had computed it."""
    by_siblings: dict[int, DraftCounts] = attrs.Factory(dict)
    by_age: dict[int, DraftCounts] = attrs.Factory(dict)
    """By the power of two of the tokens that the response had; 0 if none."""
    written: TimeBins = attrs.Factory(lambda: TimeBins(1))
    """Tokens per second, as if a chunk brought them evenly."""
    _lanes: list[InstanceLane] = attrs.Factory(list)
    _rows: array[float] = attrs.Factory(lambda: array("d"))
    _full: int = CHUNKS_AT_ONCE * len(FIGURES)

    def add_lane(self, lane: InstanceLane) -> int:
        """Return the number of one more instance, for ``add``."""
        self._lanes.append(lane)
        self._full = CHUNKS_AT_ONCE * len(FIGURES) * (1 + len(self._lanes) // LANES_AT_ONCE)
        return len(self._lanes) - 1

    def add(
        self,
        lane: int,
        chunk: ChunkRun,
        result: ChunkFinished,
        start_s: float,
        age: int,
        siblings: int,
        moved: bool,
        again: int,
    ) -> None:
        """Add a chunk that is over now.

        Its response had ``age`` tokens when it was sent, and ``siblings`` of its group had finished; the run
        began at ``start_s``.  ``again`` tokens of its context it has prefilled though they were computed.
        """
        self._rows.extend(
            (
                *(lane, chunk.begin_s - start_s, chunk.end_s - start_s, age, siblings, moved),
                *(result.tokens, result.steps, result.drafted, result.accepted),
                *(result.cached_tokens, result.pool_tokens, result.prefilled_tokens, again),
            )
        )
        if len(self._rows) >= self._full:
            self.catch_up(chunk.end_s - start_s)

    def catch_up(self, now: float) -> None:
        """Add up the chunks that have come until now."""
        if not self._rows:
            return
        table = np.array(self._rows).reshape(-1, len(FIGURES))
        del self._rows[:]
        rows = dict(zip(FIGURES, table.T, strict=True))
        self.chunks += len(table)
        self.tokens += int(rows["tokens"].sum())
        self.migrations += int(rows["moved"].sum())
        self.cached_tokens += int(rows["cached"].sum())
        self.pool_tokens += int(rows["pool"].sum())
        self.prefilled_tokens += int(rows["prefilled"].sum())
        self.again_tokens += int(rows["again"].sum())
        self._count(self.by_siblings, rows["siblings"], rows)
        self._count(self.by_age, _power_of_two(rows["age"]), rows)
        took_s = rows["end_s"] - rows["begin_s"]
        some = took_s > 0
        rates = rows["tokens"][some] / took_s[some]
        self.written.add_all(rows["begin_s"][some], rows["end_s"][some], rates[np.newaxis])
        self._add_to_lanes(rows, now)

    def _count(self, counts: dict[int, DraftCounts], keys: npt.NDArray[np.float64], rows: Columns) -> None:
        """Add the steps and drafts of chunks to those of their kind."""
        kinds, kind_of = np.unique(keys, return_inverse=True)
        names = ("steps", "tokens", "drafted", "accepted")
        sums = np.array([np.bincount(kind_of, rows[name]) for name in names]).T
        for kind, (steps, tokens, drafted, accepted) in zip(kinds.tolist(), sums.tolist(), strict=True):
            found = counts.setdefault(int(kind), DraftCounts())
            found.steps += int(steps)
            found.tokens += int(tokens)
            found.drafted += int(drafted)
            found.accepted += int(accepted)

    def _add_to_lanes(self, rows: Columns, now: float) -> None:
        numbers, lane_of = np.unique(rows["lane"], return_inverse=True)
        names = ("tokens", "prefilled", "pool")
        sums = [np.bincount(lane_of), *(np.bincount(lane_of, rows[name]) for name in names)]
        steps = np.where(rows["steps"] > 0, rows["steps"], rows["tokens"])
        chunk_rows = np.stack([rows["begin_s"], rows["end_s"], steps])
        order = np.argsort(lane_of, kind="stable")
        parts = np.split(order, np.cumsum(sums[0])[:-1])
        for number, (chunks, tokens, prefilled, pool), part in zip(
            numbers.tolist(), np.array(sums).T.tolist(), parts, strict=True
        ):
            lane = self._lanes[int(number)]
            lane.finish(int(chunks), int(tokens), prefilled, pool)
            lane.catch_up(now)
            lane.add_steps(chunk_rows[:, part])


def _power_of_two(numbers: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the largest power of two that is no larger than each; 0 for 0."""
    return np.where(numbers > 0, np.exp2(np.floor(np.log2(np.maximum(numbers, 1)))), 0.0)
