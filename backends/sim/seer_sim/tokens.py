"""The output of a simulated model: made-up tokens and log-probs, fixed by (seed, position).

An iteration of the paper has up to 250 million of them, of which few are ever read.  So a
response is a ``Drawn``: a few numbers, until it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar, overload

import msgspec

from seer_core.errors import PromptError, quote

__all__ = ["EOS_TOKEN_ID", "FIRST_TOKEN_ID", "ByteTokenizer", "Drawn", "generate"]

EOS_TOKEN_ID = 2
FIRST_TOKEN_ID = 3
"""Ids below are special, as in most vocabularies; a prompt's byte b is token 3 + b."""

TEXT_TOKENS = 64
"""Ids of a response that its text shows."""

_LOGPROBS = [-(i + 1) / 64 for i in range(256)]

T = TypeVar("T")


class TokenSeries(msgspec.Struct, frozen=True):
    """Ids that count upwards through the vocabulary, from ``first`` on; so they cost no loop."""

    first: int
    size: int

    def __call__(self, start: int, stop: int) -> list[int]:
        """Return the tokens at absolute positions ``start`` to ``stop``, the latter excluded."""
        tokens: list[int] = []
        while start + len(tokens) < stop:
            place = (self.first + start + len(tokens)) % self.size
            end = min(self.size, place + stop - start - len(tokens))
            tokens += range(place + FIRST_TOKEN_ID, end + FIRST_TOKEN_ID)
        return tokens


class LogprobSeries(msgspec.Struct, frozen=True):
    """Log-probs in nats that repeat a table, from ``first`` on."""

    first: int

    def __call__(self, start: int, stop: int) -> list[float]:
        """Return those at absolute positions ``start`` to ``stop``, the latter excluded."""
        phase = (self.first + start) % len(_LOGPROBS)
        rounds = 1 + (phase + stop - start) // len(_LOGPROBS)
        return (_LOGPROBS * rounds)[phase : phase + stop - start]


class Drawn(Sequence[T], Generic[T]):
    """``head``, then the values of ``series`` from ``start`` to ``stop``, made when they are read.

    With ``ended`` the last value is that instead.  Equal to a list of the same values.  A sum with what
    goes on where this one stops is drawn too, and so is one with a list before it; any other is a list.
    """

    __slots__ = ("_ended", "_head", "_series", "_start", "_stop")

    def __init__(
        self,
        series: Callable[[int, int], list[T]],
        start: int,
        stop: int,
        ended: T | None = None,
        head: Sequence[T] = (),
    ) -> None:
        self._series = series
        self._start = start
        self._stop = stop
        self._ended = ended
        self._head = head

    def __len__(self) -> int:
        return len(self._head) + self._stop - self._start

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        if isinstance(index, slice):
            first, last, step = index.indices(len(self))
            return self._values(first, last) if step == 1 else self._values(0, len(self))[index]
        place = index + len(self) if index < 0 else index
        if not 0 <= place < len(self):
            raise IndexError(f"index {index} of {len(self)} values")
        return self._values(place, place + 1)[0]

    def __iter__(self) -> Iterator[T]:
        return iter(self._values(0, len(self)))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Drawn):
            mine = self._series, self._start, self._stop, self._ended, self._head
            if mine == (other._series, other._start, other._stop, other._ended, other._head):
                return True
        elif not isinstance(other, list):
            return NotImplemented
        return len(self) == len(other) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def _goes_on_with(self, other: Drawn[T]) -> bool:
        return (
            other._start == self._stop
            and other._series == self._series
            and self._ended is None
            and not other._head
        )

    def __add__(self, other: Drawn[T] | list[T]) -> Drawn[T] | list[T]:
        if isinstance(other, Drawn) and self._goes_on_with(other):
            return Drawn(self._series, self._start, other._stop, other._ended, self._head)
        return [*self, *other]

    def __iadd__(self, other: Drawn[T] | list[T]) -> Drawn[T] | list[T]:
        """Go on with what goes on where this one stops, as transcripts do; any other sum is a list."""
        if isinstance(other, Drawn) and self._goes_on_with(other):
            self._stop, self._ended = other._stop, other._ended
            return self
        return [*self, *other]

    def __radd__(self, head: list[T]) -> Drawn[T]:
        head = [*head, *self._head] if self._head else head
        return Drawn(self._series, self._start, self._stop, self._ended, head)

    def __repr__(self) -> str:
        return f"<{len(self)} values drawn by {self._series!r}>"

    def tolist(self) -> list[T]:
        """Return all values, as arrays of tokens and log-probs do."""
        return self._values(0, len(self))

    def _values(self, first: int, last: int) -> list[T]:
        """Return the values number ``first`` to ``last``, the latter excluded."""
        if first >= last:
            return []
        heads = len(self._head)
        start = self._start - heads
        values = [*self._head[first:last], *self._series(start + max(first, heads), start + max(last, heads))]
        if self._ended is not None and last == len(self):
            values[-1] = self._ended
        return values


def generate(
    seed: int, start: int, count: int, stopped: bool, vocab_size: int
) -> tuple[Drawn[int], Drawn[float]]:
    """Return ``count`` tokens from absolute position ``start``, and their log-probs in nats.

    Both are invented.  The last token is EOS if the response ``stopped``.
    """
    size = vocab_size - FIRST_TOKEN_ID
    first = (seed * 0x9E3779B97F4A7C15 >> 24) % size
    ended = EOS_TOKEN_ID if stopped else None
    return (
        Drawn(TokenSeries(first, size), start, start + count, ended),
        Drawn(LogprobSeries(first), start, start + count),
    )


class ByteTokenizer:
    """Text to bytes and ids to digits, so that text prompts work without a vocabulary."""

    def encode(self, text: str) -> list[int]:
        """Return one id per UTF-8 byte."""
        return [FIRST_TOKEN_ID + byte for byte in text.encode()]

    def encode_part(self, text: str) -> list[int]:
        """Return the same ids: there are no special ones."""
        return self.encode(text)

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], template_kwargs: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Return the ids of ``role: content`` lines and the generation prompt; there are no variables.

        Raises:
            PromptError: a message has no role, or something else than text.
        """
        lines = [f"{_role(n, each)}: {_content(n, each)}\n" for n, each in enumerate(messages)]
        return self.encode("".join(lines) + "assistant: ")

    def encode_reply(
        self,
        messages: Sequence[Mapping[str, Any]],
        written: Sequence[int],
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the same of messages that follow a line of the model's."""
        return self.encode("\n") + self.encode_chat(messages)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the first ids as numbers, special ones left out, and how many more there are."""
        shown = " ".join(str(token) for token in token_ids[:TEXT_TOKENS] if token >= FIRST_TOKEN_ID)
        more = len(token_ids) - TEXT_TOKENS
        return f"{shown} and {more} more" if more > 0 else shown


def _role(number: int, message: Mapping[str, Any]) -> str:
    role = message.get("role")
    if not isinstance(role, str):
        raise PromptError(f"message {number} has no role; give it one: system, user, assistant or tool")
    return "system" if role == "developer" else role


def _content(number: int, message: Mapping[str, Any]) -> str:
    """Return the content of a message, one line for each of its parts; the assistant's may be null."""
    content = message.get("content")
    if content is None and message["role"] == "assistant":
        return ""
    texts = [_text(each) for each in (content if isinstance(content, list | tuple) else [content])]
    if None in texts:
        raise PromptError(
            f"message {number} has {quote(content)} for its content, and Seer rolls out text alone; give text"
        )
    return "\n".join(map(str, texts))


def _text(part: Any) -> str | None:
    if isinstance(part, Mapping):
        part = part.get("text") if str(part.get("type")).endswith("text") else None
    return part if isinstance(part, str) else None
