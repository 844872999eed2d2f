"""Parsers of a chat's answers: reasoning, text and calls of tools, as an engine's own server reads them.

This module says what the server needs.  ``vllm_parsers`` and ``sglang_parsers`` have it from either engine,
whose own names choose the parsers; nothing here is about the format of any model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Protocol, runtime_checkable

import attrs

from seer_core.errors import ConfigError, quote
from seer_core.model import StructuredOutputs
from seer_core.ports.engine import Tokenizer
from seer_server.protocol import ChatRequest
from seer_server.tools import ToolChoice
from seer_server.unsupported_fields import FieldError

__all__ = [
    "ChatParsers",
    "ChatReader",
    "ChatReading",
    "Decode",
    "ParserNames",
    "Reading",
    "TokenizerOfFiles",
    "ToolCall",
    "decode_all_of",
    "require_name",
    "require_parser",
]

Decode = Callable[[Sequence[int]], str]
"""Token ids to text."""


@attrs.frozen
class ToolCall:
    """A call of a tool, or its next piece; the first piece has the name."""

    index: int
    arguments: str
    name: str | None = None
    id: str | None = None


@attrs.frozen
class Reading:
    """The parts of an answer, or of its next piece; None where it has nothing of a kind."""

    content: str | None = None
    reasoning: str | None = None
    calls: Sequence[ToolCall] = ()

    @property
    def empty(self) -> bool:
        """Whether there is nothing in it."""
        return not (self.content or self.reasoning or self.calls)


class ChatReader(Protocol):
    """Reads one answer, either as a whole or in pieces; it may raise any error at text that it dislikes."""

    def read(self, text: str, token_ids: Sequence[int]) -> Reading:
        """Return the parts of a whole answer."""
        ...

    def read_piece(self, text: str, token_ids: Sequence[int], *, last: bool) -> Reading:
        """Return the parts that the next tokens bring; ``last`` with the answer's last ones."""
        ...


class ChatReading(Protocol):
    """How the answers to one request are read."""

    @property
    def form(self) -> StructuredOutputs | None:
        """The form that the answers have: the request's own, or that of the calls that it requires."""
        ...

    @property
    def special_tokens(self) -> bool:
        """Whether the parsers read text with its special tokens."""
        ...

    def reasoning_end(self, prompt: Sequence[int]) -> str | None:
        """Return the text that ends the reasoning after this prompt; None where none is expected."""
        ...

    def reader(self, prompt: Sequence[int]) -> ChatReader:
        """Return a reader of one more answer to this prompt."""
        ...


class ChatParsers(Protocol):
    """The parsers that a server was started with."""

    @property
    def reads_calls(self) -> bool:
        """Whether calls of tools are read."""
        ...

    def begin(self, chat: ChatRequest, form: StructuredOutputs | None) -> ChatReading:
        """Return how the answers to a request are read, which itself asks for this form.

        Raises:
            FieldError: the parsers refuse its tools.
        """
        ...


@attrs.frozen
class ParserNames:
    """The parsers of calls and of reasoning, by the names that the engine has for them."""

    tool_call: str | None = None
    reasoning: str | None = None


@runtime_checkable
class TokenizerOfFiles(Tokenizer, Protocol):
    """A tokenizer that is read from files."""

    @property
    def directory(self) -> Path:
        """That of the model's files."""
        ...

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """Return the text of generated ids, with special tokens."""
        ...


def decode_all_of(tokenizer: Tokenizer | None) -> Decode | None:
    """Return how a tokenizer writes tokens with special ones; None if it has no such."""
    return tokenizer.decode_all if isinstance(tokenizer, TokenizerOfFiles) else None


def require_parser(parsers: ChatParsers | None, choice: ToolChoice) -> None:
    """Refuse calls of tools that nothing would read.

    Raises:
        FieldError: tools are to be called, and the server has no parser of calls.
    """
    if choice != "none" and (parsers is None or not parsers.reads_calls):
        words = choice if isinstance(choice, str) else f"of {quote(choice.function.name)}"
        raise FieldError(
            f"tool_choice {words} needs a parser of calls; start the server with --tool-call-parser, or set"
            " tool_choice none",
            "tool_choice",
        )


def require_name(flag: str, name: str | None, known: Sequence[str]) -> None:
    """Raise ConfigError unless a parser of this name is known."""
    if name is not None and name not in known:
        near = get_close_matches(name, known, 1)
        words = f"perhaps {near[0]}" if near else f"there are {', '.join(sorted(known))}"
        raise ConfigError(f"{flag} {quote(name)}: there is no such parser; {words}")
