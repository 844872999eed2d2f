"""News of one client's responses, which wait for it to read them and never pile up."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

import attrs

from seer_core.errors import SeerError
from seer_core.model import Completion

__all__ = ["News", "Piece"]


@attrs.frozen
class Piece:
    """What a response has written since its last piece."""

    request_id: str
    token_ids: Sequence[int]
    logprobs: Sequence[float]


class News:
    """A queue with one entry at most for each response: that it has gone on, or is over.

    What it has ``written`` is looked up when the entry is read.  So a slow reader gets longer pieces, and
    what waits for it in memory is no more than its answer.
    """

    def __init__(self, written: Callable[[str], tuple[Sequence[int], Sequence[float]]]) -> None:
        self._written = written
        self._read: Counter[str] = Counter()
        self._fresh: dict[str, Completion | SeerError | None] = {}
        self._stirred = asyncio.Event()

    def went_on(self, request_id: str) -> None:
        """Let the reader know that a chunk of an unfinished response has ended."""
        self._put(request_id, None)

    def ended(self, completion: Completion) -> None:
        """Let the reader have a response that is over."""
        self._put(completion.request_id, completion)

    def failed(self, error: SeerError) -> None:
        """Let the reader know that nothing more will come."""
        self._put("", error)

    def empty(self) -> bool:
        """Whether the reader has read all there is."""
        return not self._fresh

    async def get(self) -> Piece | Completion | SeerError:
        """Wait for what is new."""
        while not self._fresh:
            self._stirred.clear()
            await self._stirred.wait()
        name = next(iter(self._fresh))
        news = self._fresh.pop(name)
        if news is not None:
            return news
        (tokens, logprobs), start = self._written(name), self._read[name]
        self._read[name] = len(tokens)
        return Piece(name, tokens[start:], logprobs[start:])

    def _put(self, name: str, news: Completion | SeerError | None) -> None:
        self._fresh[name] = news
        self._stirred.set()
