"""Stop strings: whether the text of a running chunk's response has one, token by token.

The text begins with the response's first token, or its turn's, in whichever chunk that was, so a stop string
may lie across chunks.  A response ends with the first token that completes one; what a step wrote beyond it
is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
from seer_host.text import GrowingText, find_stop

from seer_core.ports.engine import ChunkJob

__all__ = ["StopStrings"]


@attrs.define(eq=False)
class _Watched:
    """The response of a running chunk, as far as it has been read: so many tokens of this chunk."""

    job: ChunkJob
    growing: GrowingText
    tail: str
    read: int = 0


class StopStrings:
    """The running chunks that may end at a stop string; ``decode`` returns the text of tokens."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._watched: dict[str, _Watched] = {}

    def open(self, job: ChunkJob) -> None:
        """Read a chunk's response from now on, if its sampling has stop strings."""
        if job.sampling.stop:
            growing = GrowingText(self._decode, job.token_ids[: job.context_tokens])
            earlier = growing.add(job.token_ids[job.context_tokens :])
            self._watched[job.id] = _Watched(job, growing, _tail(earlier, job.sampling.stop))

    def close(self, job_id: str) -> None:
        """Forget a chunk, if it was read."""
        self._watched.pop(job_id, None)

    @property
    def read(self) -> dict[str, int]:
        """The chunks that are read, and how many of their tokens have been."""
        return {job_id: each.read for job_id, each in self._watched.items()}

    def find(self, job_id: str, token_ids: Sequence[int]) -> int | None:
        """Read further tokens of a chunk; return how many the chunk has with the one that ends it, if any."""
        watched = self._watched[job_id]
        sampling, before = watched.job.sampling, len(watched.job.token_ids) - watched.job.context_tokens
        for token in token_ids:
            watched.read += 1
            new = watched.growing.add([token])
            if before + watched.read > sampling.min_tokens and find_stop(watched.tail, new, sampling.stop):
                return watched.read
            watched.tail = _tail(watched.tail + new, sampling.stop)
        return None


def _tail(text: str, stops: Sequence[str]) -> str:
    """Return the end of a text in which a stop string may have begun."""
    size = max(map(len, stops)) - 1
    return text[-size:] if size else ""
