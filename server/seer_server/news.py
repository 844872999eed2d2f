"""News of one client's responses, which wait for it to read them and never pile up."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from seer_core.arrays import Logprobs, Tokens
from seer_core.errors import SeerError
from seer_core.model import Completion, Piece

__all__ = ["News"]


class News:
    """A queue with one entry at most for each response: that it has gone on, or is over.

    What it has ``written``, from a token on, is looked up when the entry is read.  So a slow reader gets
    longer pieces, and what waits for it in memory is no more than its answer.  A chunk that is repeated has
    written less than was read, until it has caught up: nothing is read twice.
    """

    def __init__(self, written: Callable[[str, int], tuple[Tokens, Logprobs]]) -> None:
        self._written = written
        self._read: Counter[str] = Counter()
        self._fresh: dict[str, Completion | SeerError | None] = {}
        self._stirred = asyncio.Event()

    def went_on(self, request_id: str) -> None:
        """Let the reader know that an unfinished response has written more."""
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
        while True:
            while not self._fresh:
                self._stirred.clear()
                await self._stirred.wait()
            name = next(iter(self._fresh))
            news = self._fresh.pop(name)
            if news is not None:
                return news
            start = self._read[name]
            tokens, logprobs = self._written(name, start)
            if tokens:
                self._read[name] += len(tokens)
                return Piece(name, start, tokens, logprobs)

    def _put(self, name: str, news: Completion | SeerError | None) -> None:
        self._fresh[name] = news
        self._stirred.set()
