"""Answers in the form of OpenAI's completions and chats, whole or in pieces, with vLLM's additions."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from secrets import token_hex
from typing import Any

import attrs

from seer_core.model.arrays import LEAST_LOGPROB, PromptLogprobs, TopLogprobs
from seer_core.ports.engine import Tokenizer
from seer_server.parsing import Reading, ToolCall
from seer_server.protocol import ChatRequest, CompletionRequest, GenerationRequest
from seer_server.token_names import NamesInText, Place, names_of
from seer_server.tools import NamedTool

__all__ = ["Answer", "Part", "usage"]


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
    attachments: Mapping[str, Any] = {}
    """The fields of a server's own answer that Seer does not have, with the last piece."""


class Answer:
    """Writes the answer to one request, in the form of its kind."""

    special_tokens = False
    """Whether its text has special tokens."""

    def __init__(self, asked: GenerationRequest, model: str, tokenizer: Tokenizer | None) -> None:
        self._asked, self._tokenizer = asked, tokenizer
        self._chat = isinstance(asked, ChatRequest)
        self._echoed = asked.prompts() if isinstance(asked, CompletionRequest) and asked.echo else None
        self._alone = isinstance(asked, CompletionRequest) and asked.echoes_alone
        self.own_id = asked.rid or asked.request_id
        """The client's id of the request."""
        kind = "chatcmpl" if self._chat else "cmpl"
        self.id = asked.rid or f"{kind}-{asked.request_id or token_hex(12)}"
        self._head = {"id": self.id, "created": int(time.time()), "model": model}
        self._words: dict[int, NamesInText] = {}
        """Those of the tokens so far, by choice."""
        self._written: Counter[int] = Counter()
        self._prompt_tokens: dict[int, int] = {}
        """The numbers of tokens so far, by choice."""
        self._calling: set[int] = set()
        """The choices that have called a tool."""
        self.version = 0
        """The weights by which the responses are written."""
        options = asked.stream_options
        self.counts = options is not None and bool(options.include_usage)
        self._counts_each = options is not None and self.counts and bool(options.continuous_usage_stats)

    def new_group(self) -> str:
        """Return a group's id for a request that names none; its seed follows from that.

        One of the client's, which may come again, is not enough.
        """
        return self.id if self.own_id is None else f"{self.id}-{token_hex(4)}"

    @property
    def names(self) -> dict[str, str]:
        """The request's own names for fields of completions that it has under others."""
        found = {"group_id": "group"}
        if self._asked.group is None and self.own_id is not None:
            found["group_id"] = "rid" if self._asked.rid else "request_id"
        if self._asked.response_format is not None:
            found["structured_outputs"] = "response_format"
        if getattr(self._asked, "max_completion_tokens", None) is not None:
            found["max_tokens"] = "max_completion_tokens"
        return found

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
        return {**self._event, "choices": [choice], **self._prompt(part), **self._usage_so_far(part)}

    def skip(self, index: int, token_ids: Sequence[int], reading: Reading) -> None:
        """Go on behind tokens of a choice that the client has already, and the parts that they brought."""
        self._written[index] += len(token_ids)
        if reading.calls:
            self._calling.add(index)
        wanted = getattr(self._asked, "logprobs", None)
        if wanted is not None and wanted is not False:
            self._words_of(index).skip(token_ids)

    def events(self, part: Part) -> list[dict[str, Any]]:
        """Return the events of a piece: one, or none if a parser holds back all that it brings."""
        self._written[part.index] += len(part.token_ids)
        if part.prompt_token_ids is not None:
            self._prompt_tokens[part.index] = len(part.prompt_token_ids)
        if part.reading is not None and self._shows_nothing(part, part.reading):
            return []
        return [self.piece(part)]

    def _usage_so_far(self, part: Part) -> dict[str, Any]:
        """Return the field ``usage`` of a piece: the numbers of its choice so far, where they are wanted."""
        if not self.counts:
            return {}
        if not self._counts_each:
            return {"usage": None}
        return {"usage": usage(self._prompt_tokens.get(part.index, 0), self._written[part.index])}

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

    def _new_words(self) -> NamesInText:
        names = None if self._tokenizer is None else names_of(self._tokenizer)
        return NamesInText(names, ids=bool(self._asked.return_tokens_as_token_ids))

    def _words_of(self, index: int) -> NamesInText:
        """Return the words of a choice, behind its tokens so far."""
        return self._words.setdefault(index, self._new_words())

    def _logprobs(self, part: Part) -> dict[str, Any] | None:
        if self._chat:
            return {**self.chat_logprobs(part), "refusal": None}
        places: list[Place] = list(zip(part.token_ids, part.logprobs, part.tops or repeat(()), strict=False))
        if self._alone:
            places = []
        words = self._words_of(part.index)
        named = list(words.named(_with_own(places)))
        if self._echoed is not None and part.prompt_token_ids is not None:
            if part.prompt_logprobs is None:
                return None  # it has failed before it had a token
            of_prompt, (first, *others) = self._new_words(), _places_of(part)
            named = [(of_prompt.first_word(first[0]), None, ()), *of_prompt.named(_with_own(others)), *named]
        return {
            "tokens": [word for word, _, _ in named],
            "token_logprobs": [score for _, score, _ in named],
            "top_logprobs": [_most_probable(top) for _, _, top in named],
            "text_offset": words.offsets([word for word, _, _ in named]),
        }

    def chat_logprobs(self, part: Part) -> dict[str, Any]:
        """Return log-probs as a chat has them."""
        words, content = self._words_of(part.index), []
        tops = repeat(()) if part.tops is None else part.tops
        for token, score, top in zip(part.token_ids, part.logprobs, tops, strict=False):
            found, text = _scored(words.word(token), score), words.text(token)
            others = [_scored(words.word(each), logprob) for each, logprob in top]
            content.append({**found, "bytes": _bytes(text), "top_logprobs": others})
            words.read(token)
        return {"content": content}

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
        names = None if self._tokenizer is None else names_of(self._tokenizer)
        words = NamesInText(names)
        for token, logprob, top in _places_of(part)[1:]:
            places.append(
                {
                    each: {"logprob": score, "rank": None, "decoded_token": words.word(each)}
                    for each, score in {token: logprob, **dict(top)}.items()
                }
            )
            words.read(token)
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


def _with_own(places: Iterable[Place]) -> Iterator[Place]:
    """Yield places whose tokens are themselves among the most probable ones, behind the others."""
    for token, score, top in places:
        yield token, score, top if score is None else [*top, (token, score)]


def _most_probable(top: Iterable[tuple[str, float]]) -> dict[str, float] | None:
    """Return log-probs by words; of tokens with one word the most probable is there."""
    found: dict[str, float] = {}
    for word, logprob in top:
        found.setdefault(word, max(logprob, LEAST_LOGPROB))
    return found or None


def _scored(word: str, logprob: float) -> dict[str, Any]:
    return {"token": word, "logprob": max(logprob, LEAST_LOGPROB), "bytes": _bytes(word)}


def _bytes(text: str | None) -> list[int] | None:
    return None if text is None else list(text.encode(errors="replace"))


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """Return numbers of tokens as OpenAI names them."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
