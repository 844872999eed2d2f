"""Pieces of running chunks, sent while their responses are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, isfinite
from typing import Any

from msgspec import structs

from seer_core.model.arrays import Logprobs, Tokens
from seer_core.ports.contracts import implemented
from seer_core.ports.engine import ChunkJob, ChunkPiece
from seer_worker.process.adapter import EngineAdapter
from seer_worker.wire import Streamed

__all__ = ["PIECE_INTERVAL_S", "Streams"]

PIECE_INTERVAL_S = 0.05
"""Pieces of chunks that stream are sent at most this often, but for the first of each."""


class Streams:
    """The running chunks that stream, and how far each has been sent."""

    def __init__(self, adapter: EngineAdapter) -> None:
        self._written: Callable[..., Any] | None = implemented(adapter, "written")
        self._top_logprobs: Callable[..., Any] | None = implemented(adapter, "top_logprobs")
        self._sent: dict[str, int] = {}
        self._with_tops: set[str] = set()
        self._next_s = -inf

    def open(self, job: ChunkJob) -> None:
        """Send what a chunk writes from now on, if its job streams and the engine can."""
        wants_tops = bool(job.sampling.top_logprobs)
        if job.streams and self._written is not None and not (wants_tops and self._top_logprobs is None):
            self._sent[job.id] = 0
            if wants_tops:
                self._with_tops.add(job.id)

    def close(self, job_id: str) -> None:
        """Forget a chunk, if it streams."""
        self._sent.pop(job_id, None)
        self._with_tops.discard(job_id)

    def grown(self, now_s: float) -> list[Streamed]:
        """Return what chunks that stream have written: at first at once, then every few steps."""
        due = now_s >= self._next_s
        grown = []
        for job_id, sent in self._sent.items():
            if due or not sent:
                assert self._written is not None
                piece = _piece(job_id, sent, *self._written(job_id, sent))
                if piece.token_ids:
                    end = sent + len(piece.token_ids)
                    if job_id in self._with_tops:
                        assert self._top_logprobs is not None
                        tops = self._top_logprobs(job_id, sent, end)
                        piece = structs.replace(piece, top_logprobs=tops)
                    grown.append(Streamed(piece))
                    self._sent[job_id] = end
        if due and grown:
            self._next_s = now_s + PIECE_INTERVAL_S
        return grown


def _piece(job_id: str, start: int, tokens: Sequence[int], logprobs: Sequence[float]) -> ChunkPiece:
    """Return what may be sent of it: a chunk fails for a log-prob that is not finite."""
    size = next((at for at, each in enumerate(logprobs) if not isfinite(each)), len(logprobs))
    size = min(size, len(tokens))
    return ChunkPiece(job_id, start, Tokens(tokens[:size]), Logprobs(logprobs[:size]))
