"""The text of one choice, as a whole and in pieces, and the parts that a chat's parsers find in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from secrets import token_hex
from typing import Protocol

import attrs
import structlog
from seer_host.text import text_before_stop

from seer_core.error_origin import one_line
from seer_core.model import Completion, PromptGroup
from seer_core.ports.engine import Tokenizer
from seer_server.parsing import (
    ChatReader,
    ChatReading,
    Decode,
    Reading,
    TokenizerOfFiles,
    ToolCall,
    decode_all_of,
)
from seer_server.protocol import ChatRequest
from seer_server.text import StreamedText

__all__ = ["ChoiceReader", "ParsedChoices", "PlainChoices", "StreamedChoice"]

log = structlog.get_logger("seer")


class StreamedChoice(Protocol):
    """One choice of a stream."""

    def add(self, token_ids: Sequence[int]) -> Reading:
        """Return the parts that these tokens bring for sure."""
        ...

    def rest(self, token_ids: Sequence[int], completion: Completion) -> Reading:
        """Return the parts that are missing, of which these tokens are new."""
        ...


class ChoiceReader(Protocol):
    """Reads the choices of one request."""

    @property
    def parsed(self) -> bool:
        """Whether parsers read them."""
        ...

    def whole(self, group: PromptGroup, completion: Completion) -> Reading:
        """Return the parts of a choice that is over."""
        ...

    def stream(self, group: PromptGroup) -> StreamedChoice:
        """Return a choice that comes in pieces."""
        ...


@attrs.frozen
class PlainChoices:
    """Reads choices of text alone; with its ``special_tokens``, if the tokenizer has such."""

    tokenizer: Tokenizer | None
    special_tokens: bool = False
    parsed: bool = False

    def whole(self, group: PromptGroup, completion: Completion) -> Reading:
        """Return the text of a choice that is over."""
        return Reading(self._text(group, completion))

    def stream(self, group: PromptGroup) -> StreamedChoice:
        """Return a choice that comes in pieces."""
        plain = None if self.tokenizer is None else self.tokenizer.decode
        text = StreamedText(self._decode_all or plain, group.sampling, group.prompt_token_ids)
        return _PlainChoice(text, partial(self._text, group))

    @property
    def _decode_all(self) -> Decode | None:
        return decode_all_of(self.tokenizer) if self.special_tokens else None

    def _text(self, group: PromptGroup, completion: Completion) -> str:
        if (decode := self._decode_all) is not None:
            return text_with_special_tokens(decode, group, completion)
        return completion.text or ""


@attrs.frozen
class _PlainChoice:
    text: StreamedText
    whole_text: Callable[[Completion], str]

    def add(self, token_ids: Sequence[int]) -> Reading:
        """Return the text that is sure with these tokens."""
        return Reading(self.text.add(token_ids))

    def rest(self, token_ids: Sequence[int], completion: Completion) -> Reading:
        """Return the text that is missing."""
        return Reading(self.text.rest(self.whole_text(completion)))


class ParsedChoices:
    """Reads choices of a chat by parsers.

    A parser that fails leaves the text as it is, from there on.
    """

    parsed = True

    def __init__(self, chat: ChatRequest, reading: ChatReading, tokenizer: TokenizerOfFiles) -> None:
        self._reading, self._single = reading, not chat.parallel_tool_calls
        self._decode = tokenizer.decode_all if reading.special_tokens else tokenizer.decode

    def whole(self, group: PromptGroup, completion: Completion) -> Reading:
        """Return the parts of a choice that is over."""
        text = self._text(group, completion)
        try:
            found = self._reading.reader(group.prompt_token_ids).read(text, completion.token_ids)
        except Exception as error:  # a parser may raise anything
            _warn(error)
            return Reading(text)
        calls = [attrs.evolve(each, id=each.id or new_call_id()) for each in found.calls]
        return attrs.evolve(found, calls=calls[:1] if self._single else calls)

    def stream(self, group: PromptGroup) -> StreamedChoice:
        """Return a choice that comes in pieces."""
        reader = self._reading.reader(group.prompt_token_ids)
        text = StreamedText(self._decode, group.sampling, group.prompt_token_ids)
        return _ParsedChoice(reader, text, self._single, lambda completion: self._text(group, completion))

    def _text(self, group: PromptGroup, completion: Completion) -> str:
        """Return a choice's text, with special tokens if the parsers read them, but not with its end."""
        if not self._reading.special_tokens:
            return completion.text or ""
        return text_with_special_tokens(self._decode, group, completion)


@attrs.define(eq=False)
class _ParsedChoice:
    """A choice whose parser reads one token after the other, so that pieces of any length bring the same."""

    reader: ChatReader
    text: StreamedText
    single: bool
    whole_text: Callable[[Completion], str]
    failed: bool = False

    def add(self, token_ids: Sequence[int]) -> Reading:
        """Return the parts that these tokens bring for sure."""
        return joined([self._read(self.text.add([token]), [token], last=False) for token in token_ids])

    def rest(self, token_ids: Sequence[int], completion: Completion) -> Reading:
        """Return the parts that are missing."""
        before = self.add(token_ids[:-1])
        text = self.text.rest(self.whole_text(completion))
        return joined([before, self._read(text, token_ids[-1:], last=True)])

    def _read(self, text: str, token_ids: Sequence[int], *, last: bool) -> Reading:
        if self.failed:
            return Reading(text)
        try:
            found = self.reader.read_piece(text, token_ids, last=last)
        except Exception as error:  # a parser may raise anything
            _warn(error)
            self.failed = True
            return Reading(text)
        if not self.single:
            return found
        return attrs.evolve(found, calls=[each for each in found.calls if each.index == 0])


def text_with_special_tokens(decode: Decode, group: PromptGroup, completion: Completion) -> str:
    """Return a choice's text by a ``decode`` that keeps special tokens, but without the one that ends it."""
    tokens, stopped = completion.token_ids, completion.finish_reason == "stop"
    if stopped and completion.stop_reason is None and not group.sampling.include_stop_str_in_output:
        tokens, stopped = tokens[:-1], False
    found = text_before_stop(decode, group.sampling, group.prompt_token_ids, tokens, stopped)
    return found.text or ""


def joined(readings: Sequence[Reading]) -> Reading:
    """Return pieces that follow each other as one; each call has one piece in it."""
    calls: dict[int, ToolCall] = {}
    for call in (each for reading in readings for each in reading.calls):
        before = calls.get(call.index)
        if before is not None:
            arguments, name, id = before.arguments + call.arguments, before.name, before.id
            call = ToolCall(call.index, arguments, name or call.name, id or call.id)
        calls[call.index] = call
    contents = [each.content for each in readings if each.content is not None]
    reasoning = [each.reasoning for each in readings if each.reasoning is not None]
    return Reading(
        "".join(contents) if contents else None,
        "".join(reasoning) if reasoning else None,
        list(calls.values()),
    )


def new_call_id() -> str:
    """Return an id for a call, as vLLM makes them."""
    return f"chatcmpl-tool-{token_hex(16)}"


_WARNED: set[type[Exception]] = set()


def _warn(error: Exception) -> None:
    """Log that a parser has failed, once for each kind of error."""
    if type(error) not in _WARNED:
        _WARNED.add(type(error))
        log.warning("parser_failed", error=f"{type(error).__name__}: {one_line(error)}")
