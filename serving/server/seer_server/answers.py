"""Answers in the form of OpenAI's completions and chats, whole or in pieces, with vLLM's additions."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, repeat
from secrets import token_hex
from typing import Any

import attrs

from seer_core.model.arrays import LEAST_LOGPROB, PromptLogprobs, TopLogprobs
from seer_core.ports.engine import Tokenizer
from seer_core.text import REPLACEMENT
from seer_server.parsing import Reading, ToolCall
from seer_server.protocol import ChatRequest, CompletionRequest, GenerationRequest
from seer_server.tools import NamedTool

__all__ = ["Answer", "Part", "usage"]

Pairs = Sequence[tuple[int, float]]
Place = tuple[int, float | None, Pairs]
"""A token, its log-prob, and the most probable tokens in its place."""


@attrs.frozen
class Part:
    """A response, or its next piece; with the tokens of its prompt if it is the first piece, or the only.

    ``reading`` has the parts of a chat's answer that was read by parsers.
    """

    index: int
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: str | None
    prompt_token_ids: Sequence[int] | None
    stop_reason: str | int | None = None
    tops: TopLogprobs | None = None
    prompt_logprobs: PromptLogprobs | None = None
    reading: Reading | None = None


class Answer:
    """Writes the answer to one request, in the form of its kind."""

    def __init__(self, asked: GenerationRequest, model: str, tokenizer: Tokenizer | None) -> None:
        self._asked, self._tokenizer = asked, tokenizer
        self._chat = isinstance(asked, ChatRequest)
        self._echoed = asked.prompts() if isinstance(asked, CompletionRequest) and asked.echo else None
        self._alone = isinstance(asked, CompletionRequest) and asked.echoes_alone
        self.id = f"{'chatcmpl' if self._chat else 'cmpl'}-{token_hex(12)}"
        self._head = {"id": self.id, "created": int(time.time()), "model": model}
        self._offsets: Counter[int] = Counter()
        """Characters of the words so far, by choice."""
        self._calling: set[int] = set()
        """The choices that have called a tool."""
        self.counts = asked.stream_options is not None and asked.stream_options.include_usage

    def whole(self, parts: Sequence[Part], numbers: dict[str, int], weight_version: int) -> dict[str, Any]:
        """Return the body with all responses; ``numbers`` are its usage."""
        name = "chat.completion" if self._chat else "text_completion"
        choices = [self._choice(part, "message", {"role": "assistant"}) for part in parts]
        more = {"usage": numbers, "weight_version": weight_version}
        return {**self._head, "object": name, "choices": choices, **self._prompt(parts[0]), **more}

    def piece(self, part: Part) -> dict[str, Any]:
        """Return the event of a piece."""
        speaker = {} if part.prompt_token_ids is None else {"role": "assistant"}
        choice = self._choice(part, "delta", speaker)
        more = {"usage": None} if self.counts else {}
        return {**self._event, "choices": [choice], **self._prompt(part), **more}

    def events(self, part: Part) -> list[dict[str, Any]]:
        """Return the events of a piece: one, or none if a parser holds back all that it brings."""
        if part.reading is not None and self._shows_nothing(part, part.reading):
            return []
        return [self.piece(part)]

    def _shows_nothing(self, part: Part, reading: Reading) -> bool:
        inner = part.prompt_token_ids is None and part.finish_reason is None
        wants_tokens = self._asked.return_token_ids or getattr(self._asked, "logprobs", None)
        return inner and reading.empty and not wants_tokens

    def last(self, numbers: dict[str, int]) -> dict[str, Any]:
        """Return the event that has the usage, after all pieces."""
        return {**self._event, "choices": [], "usage": numbers}

    def closing(self, numbers: dict[str, int]) -> list[dict[str, Any]]:
        """Return the events after all pieces: the usage, where it is asked for."""
        return [self.last(numbers)] if self.counts else []

    @property
    def _event(self) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk" if self._chat else "text_completion"}

    def _choice(self, part: Part, place: str, speaker: dict[str, str]) -> dict[str, Any]:
        """Return one of the choices; a chat has its role and text in ``place``."""
        choice: dict[str, Any] = {
            "index": part.index,
            "logprobs": None,
            "finish_reason": part.finish_reason,
            "stop_reason": part.stop_reason,
        }
        if part.reading is not None:
            choice[place] = {**speaker, **self._parts(part, part.reading, place == "delta")}
            choice["finish_reason"] = self._reason(part)
        elif self._chat:
            choice[place] = {**speaker, "content": part.text}
        else:
            choice["text"] = self._shown(part)
            if self._asked.prompt_logprobs is not None:
                choice["prompt_logprobs"] = self.prompt_logprobs(part)
        wanted = getattr(self._asked, "logprobs", None)
        if wanted if self._chat else wanted is not None:
            choice["logprobs"] = self._logprobs(part)
        if self._asked.return_token_ids:
            choice["token_ids"] = list(part.token_ids)
            if not self._chat and part.prompt_token_ids is not None:
                choice["prompt_token_ids"] = list(part.prompt_token_ids)
        return choice

    def _parts(self, part: Part, reading: Reading, streams: bool) -> dict[str, Any]:
        """Return the parts of a message as vLLM has them; a piece has those that it brings."""
        parts: dict[str, Any] = {}
        if reading.content is not None or not streams:
            parts["content"] = reading.content
        elif part.prompt_token_ids is not None:
            parts["content"] = ""
        if reading.reasoning is not None or not streams:
            parts["reasoning"] = reading.reasoning
        if reading.calls:
            self._calling.add(part.index)
            parts["tool_calls"] = [_call(each, streams) for each in reading.calls]
        return parts

    def _reason(self, part: Part) -> str | None:
        """Return why a response is over: for calls, unless the request names the one that it makes."""
        named = isinstance(getattr(self._asked, "tool_choice", None), NamedTool)
        calls = part.index in self._calling and not named
        return "tool_calls" if calls and part.finish_reason == "stop" else part.finish_reason

    def _shown(self, part: Part) -> str:
        """Return the text of a completion, behind its prompt where that is wanted."""
        if self._echoed is None or part.prompt_token_ids is None:
            return "" if self._alone else part.text
        given = self._echoed[part.index // self._asked.n]
        prompt = given.get("prompt")
        if prompt is None:
            prompt = "" if self._tokenizer is None else self._tokenizer.decode(given["prompt_token_ids"])
        return str(prompt) if self._alone else f"{prompt}{part.text}"

    def _word(self, token: int) -> str:
        return f"token_id:{token}" if self._tokenizer is None else self._tokenizer.decode([token])

    def _logprobs(self, part: Part) -> dict[str, Any] | None:
        if self._chat:
            return {**self.chat_logprobs(part), "refusal": None}
        places: list[Place] = list(zip(part.token_ids, part.logprobs, part.tops or repeat(()), strict=False))
        if self._alone:
            places = []
        if self._echoed is not None and part.prompt_token_ids is not None:
            if part.prompt_logprobs is None:
                return None  # it has failed before it had a token
            places = [*_places_of(part), *places]
        words = [self._word(token) for token, _, _ in places]
        offsets = list(accumulate(map(len, words), initial=self._offsets[part.index]))
        self._offsets[part.index] = offsets.pop()
        tops = None if part.tops is None else [self._most_probable(*each) for each in places]
        scores = [score for _, score, _ in places]
        return {"tokens": words, "token_logprobs": scores, "top_logprobs": tops, "text_offset": offsets}

    def _most_probable(self, token: int, score: float | None, top: Pairs) -> dict[str, float] | None:
        """Return log-probs of the most probable tokens in a place and of its own, by their words.

        Of tokens with one word the most probable is there.
        """
        if score is None:
            return None
        found: dict[str, float] = {}
        for each, logprob in (*top, (token, score)):
            found.setdefault(self._word(each), max(logprob, LEAST_LOGPROB))
        return found

    def chat_logprobs(self, part: Part) -> dict[str, Any]:
        """Return log-probs as a chat has them."""
        tops = repeat(()) if part.tops is None else part.tops
        return {
            "content": [
                {**self._scored(token, score), "top_logprobs": [self._scored(*each) for each in top]}
                for token, score, top in zip(part.token_ids, part.logprobs, tops, strict=False)
            ]
        }

    def _scored(self, token: int, logprob: float) -> dict[str, Any]:
        word = self._word(token)
        inside = REPLACEMENT in word  # a part of a character
        return {
            "token": word,
            "logprob": max(logprob, LEAST_LOGPROB),
            "bytes": None if inside else list(word.encode()),
        }

    def _prompt(self, part: Part) -> dict[str, Any]:
        """Return what is wanted of the prompt of a chat: it has one, for all its choices."""
        found: dict[str, Any] = {}
        if self._chat and part.prompt_token_ids is not None and not part.index:
            if self._asked.return_token_ids:
                found["prompt_token_ids"] = list(part.prompt_token_ids)
            if self._asked.prompt_logprobs is not None:
                found["prompt_logprobs"] = self.prompt_logprobs(part)
        return found

    def prompt_logprobs(self, part: Part) -> list[dict[int, dict[str, Any]] | None] | None:
        """Return log-probs of a prompt as vLLM has them, by token ids; no rank is computed."""
        if part.prompt_logprobs is None or part.prompt_token_ids is None:
            return None
        places: list[dict[int, dict[str, Any]] | None] = [None]
        for token, logprob, top in _places_of(part)[1:]:
            places.append(
                {
                    each: {"logprob": score, "rank": None, "decoded_token": self._word(each)}
                    for each, score in {token: logprob, **dict(top)}.items()
                }
            )
        return places


def _call(call: ToolCall, streams: bool) -> dict[str, Any]:
    """Return a call, or its next piece, as OpenAI has it."""
    function = {"arguments": call.arguments}
    if not streams:
        named = {"name": call.name, **function}
        return {"id": call.id, "type": "function", "function": named}
    if call.name is None:
        return {"index": call.index, "function": function}
    named = {"name": call.name, **function}
    return {"index": call.index, "id": call.id, "type": "function", "function": named}


def _places_of(part: Part) -> list[Place]:
    """Return a prompt's tokens, their log-probs and the most probable ones; the first token has none."""
    found, prompt = part.prompt_logprobs, part.prompt_token_ids
    assert found is not None
    assert prompt is not None
    others = zip(prompt[1:], found.logprobs, found.top_logprobs or repeat(()), strict=False)
    return [(prompt[0], None, ()), *others]


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """Return numbers of tokens as OpenAI names them."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
