"""Sums over the chunks that brought tokens, added up some thousand at a time."""

from __future__ import annotations

from array import array

import attrs
import numpy as np
import numpy.typing as npt

from seer_cli.report.bins import TimeBins
from seer_cli.report.lanes import InstanceLane
from seer_core.model.chunk_runs import ChunkRun
from seer_core.model.events import ChunkFinished

__all__ = ["DraftCounts", "FinishedChunks"]

FIGURES = (
    *("lane", "beside", "begin_s", "end_s", "age", "siblings", "moved"),
    *("tokens", "steps", "drafted", "accepted", "cached", "pool", "prefilled"),
)
CHUNKS_AT_ONCE = 4096

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

    def add_lane(self, lane: InstanceLane) -> int:
        """Return the number of one more instance, for ``add``."""
        self._lanes.append(lane)
        return len(self._lanes) - 1

    def add(
        self,
        lane: int,
        beside: int,
        chunk: ChunkRun,
        result: ChunkFinished,
        start_s: float,
        age: int,
        siblings: int,
        moved: bool,
    ) -> None:
        """Add a chunk that ``beside`` chunks ran with on its instance, itself included.

        Its response had ``age`` tokens when it was sent, and ``siblings`` of its group had finished; the run
        began at ``start_s``.
        """
        self._rows.extend(
            (
                *(lane, beside, chunk.begin_s - start_s, chunk.end_s - start_s, age, siblings, moved),
                *(result.tokens, result.steps, result.drafted, result.accepted),
                *(result.cached_tokens, result.pool_tokens, result.prefilled_tokens),
            )
        )
        if len(self._rows) >= CHUNKS_AT_ONCE * len(FIGURES):
            self.catch_up()

    def catch_up(self) -> None:
        """Add up the chunks that have come."""
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
        self.again_tokens += int(rows["prefilled"][rows["age"] > 0].sum())
        self._count(self.by_siblings, rows["siblings"], rows)
        self._count(self.by_age, _power_of_two(rows["age"]), rows)
        took_s = rows["end_s"] - rows["begin_s"]
        some = took_s > 0
        rates = rows["tokens"][some] / took_s[some]
        self.written.add_all(rows["begin_s"][some], rows["end_s"][some], rates[np.newaxis])
        self._add_to_lanes(rows, took_s)

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

    def _add_to_lanes(self, rows: Columns, took_s: npt.NDArray[np.float64]) -> None:
        numbers, lane_of = np.unique(rows["lane"], return_inverse=True)
        names = ("tokens", "prefilled", "pool")
        sums = [np.bincount(lane_of), *(np.bincount(lane_of, rows[name]) for name in names)]
        for number, (chunks, tokens, prefilled, pool) in zip(
            numbers.tolist(), np.array(sums).T.tolist(), strict=True
        ):
            self._lanes[int(number)].finish(int(chunks), int(tokens), prefilled, pool)
        steps = np.where(rows["steps"] > 0, rows["steps"], rows["tokens"])
        loads = np.log2(rows["beside"]).astype(np.int64)
        pairs, pair_of = np.unique(rows["lane"] * 64 + loads, return_inverse=True)
        for pair, seconds, counted in zip(
            pairs.astype(np.int64).tolist(),
            np.bincount(pair_of, took_s).tolist(),
            np.bincount(pair_of, steps).tolist(),
            strict=True,
        ):
            self._lanes[pair // 64].add_speed(pair % 64, seconds, counted)


def _power_of_two(numbers: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the largest power of two that is no larger than each; 0 for 0."""
    return np.where(numbers > 0, np.exp2(np.floor(np.log2(np.maximum(numbers, 1)))), 0.0)
