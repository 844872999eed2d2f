"""The updates of one client's responses, of which a slow reader has one at most for each response."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

import attrs

from seer_core.errors import SeerError
from seer_core.model import Completion
from seer_core.model.arrays import Logprobs, PromptLogprobs, Tokens, TopLogprobs

__all__ = ["Piece", "UpdateQueue"]


@attrs.frozen
class Piece:
    """The tokens of an unfinished response from ``start`` on."""

    request_id: str
    start: int
    token_ids: Tokens
    logprobs: Logprobs
    top_logprobs: TopLogprobs | None = None
    prompt_logprobs: PromptLogprobs | None = None
    """With the first tokens, where the request asks for them."""


class UpdateQueue:
    """A queue with one entry at most for each response: it has new tokens, or is over.

    The tokens are looked up with ``written(request_id, start)`` when the entry is read, and the most probable
    ones with ``tops(request_id, start, end)``.  So a slow reader gets longer pieces, and its queue holds no
    more than its answer.  A chunk that is repeated has written less than was read, until it has caught up: no
    token is read twice.  With ``of_prompt`` the first piece waits for the log-probs of its prompt.
    """

    def __init__(
        self,
        written: Callable[[str, int], tuple[Tokens, Logprobs]],
        tops: Callable[[str, int, int], TopLogprobs | None] = lambda *_: None,
        of_prompt: Callable[[str], PromptLogprobs | None] | None = None,
    ) -> None:
        self._written = written
        self._tops = tops
        self._of_prompt = of_prompt
        self._read: Counter[str] = Counter()
        self._unread: dict[str, Completion | SeerError | None] = {}
        self._changed = asyncio.Event()

    def notify(self, request_id: str) -> None:
        """Put an entry for an unfinished response that has new tokens."""
        self._put(request_id, None)

    def complete(self, completion: Completion) -> None:
        """Put a response that is over."""
        self._put(completion.request_id, completion)

    def fail(self, error: SeerError) -> None:
        """Put the error with which all responses have ended."""
        self._put("", error)

    def empty(self) -> bool:
        """Return whether every entry has been read."""
        return not self._unread

    async def get(self) -> Piece | Completion | SeerError:
        """Wait for the next update, and return it."""
        while True:
            while not self._unread:
                self._changed.clear()
                await self._changed.wait()
            name = next(iter(self._unread))
            update = self._unread.pop(name)
            if update is not None:
                return update
            start, prompt = self._read[name], None
            if self._of_prompt is not None and not start:
                prompt = self._of_prompt(name)
                if prompt is None:
                    continue  # they come with the end of its first chunk
            tokens, logprobs = self._written(name, start)
            if tokens:
                end = self._read[name] = start + len(tokens)
                return Piece(name, start, tokens, logprobs, self._tops(name, start, end), prompt)

    def _put(self, name: str, update: Completion | SeerError | None) -> None:
        self._unread[name] = update
        self._changed.set()
