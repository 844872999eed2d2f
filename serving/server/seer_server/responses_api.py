"""OpenAI's Responses, as far as they are one answer of text: no tools, no state between two requests."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from seer_core.model import SamplingChoice
from seer_core.ports.engine import Tokenizer
from seer_server.answers import Answer, Part
from seer_server.neutral import FieldError, own_fields
from seer_server.protocol import (
    ChatRequest,
    FormatType,
    JsonSchema,
    ResponseFormat,
    convert,
)

__all__ = ["ResponsesAnswer", "ResponsesRequest", "parse_responses"]

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "conversation": (),
    "max_tool_calls": (),
    "previous_response_id": (),
    "prompt": (),
    "prompt_logprobs": (),
    "reasoning": ({},),
    "stream_options": ({}, {"include_obfuscation": False}, {"include_obfuscation": True}),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncation": ("disabled",),
}
"""Fields of Responses that Seer does not have, and their values that change nothing."""

LOGPROBS = "message.output_text.logprobs"
"""Stands in ``include`` where log-probs are wanted."""

ROLES = {"developer": "system"}
"""Roles that chat templates lack, and those that stand for them."""


class TextFormat(msgspec.Struct, frozen=True):
    """The form of the text; its name and ``strict`` change nothing."""

    type: FormatType = "text"
    """Whether it is text of any form, an object of JSON, or JSON after a schema."""
    schema: dict[str, Any] | None = None
    """The schema, with ``json_schema``."""


class TextOptions(msgspec.Struct, frozen=True):
    """Options of the text; ``verbosity`` changes nothing."""

    format: TextFormat = TextFormat()
    """The form that it has."""


class ResponsesRequest(SamplingChoice, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of ``POST /v1/responses``."""

    input: str | list[dict[str, Any]]
    """Text of the user's, or the messages so far."""
    instructions: str | None = None
    """A system message before them."""
    model: str | None = None
    """The name of the model that is served; it may be left out."""
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    """The most tokens of the response."""
    text: TextOptions | None = None
    """Options of the text, such as its form."""
    include: list[Literal["message.output_text.logprobs"]] | None = None
    """With ``message.output_text.logprobs`` the text has log-probs of its tokens, and of as many others as
    ``top_logprobs`` says.
    """
    stream: bool | None = None
    """Whether the text is sent as server-sent events while it is written."""
    seed: int | None = None
    """The group's seed, a field of Seer's."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the model's chat template, such as ``enable_thinking``."""
    group: str | None = None
    """The id of the group, a field of Seer's. The header ``X-Seer-Group`` gives it where this is absent."""
    priority: int | None = None
    """The group's label ``priority``, which strategies see. The header ``X-Seer-Priority`` gives it where
    this is absent.
    """
    prompt_logprobs: Annotated[int, Meta(ge=0, le=0)] | None = None
    """Absent: this answer has no log-probs of its prompt."""
    timeout_s: float | None = None
    """The response is aborted if it is not over so long after its submission; a field of Seer's."""

    def chat(self) -> ChatRequest:
        """Return the same request as a chat.

        Raises:
            FieldError: the input has something else than messages of text.
        """
        given = self.input if isinstance(self.input, list) else [{"role": "user", "content": self.input}]
        messages = [_message(item) for item in given]
        if self.instructions is not None:
            messages.insert(0, {"role": "system", "content": self.instructions})
        names = ("model", "stream", "seed", "chat_template_kwargs", "group", "priority", "timeout_s")
        fields = {name: getattr(self, name) for name in (*names, *SamplingChoice.__struct_fields__)}
        fields |= {"max_tokens": self.max_output_tokens, "response_format": self._form()}
        return ChatRequest(messages=messages, logprobs=bool(self.include), **fields)

    def _form(self) -> ResponseFormat | None:
        if self.text is None:
            return None
        form = self.text.format
        return ResponseFormat(form.type, None if form.schema is None else JsonSchema(form.schema))


def _message(item: dict[str, Any]) -> dict[str, Any]:
    """Return a message of the input as chats have it."""
    kind, role = item.get("type", "message"), item.get("role")
    if kind != "message" or not isinstance(role, str):
        raise FieldError("input has an item that is no message; there is nothing else to send", "input")
    return {"role": ROLES.get(role, role), "content": item.get("content")}


def parse_responses(body: bytes) -> ResponsesRequest:
    """Read a request.

    Raises:
        PromptError: it is none, or asks for what Seer does not do.
    """
    asked = convert(body, ResponsesRequest, "a response", lambda fields: own_fields(fields, NEUTRAL))
    if asked.top_logprobs and not asked.include:
        raise FieldError(
            f"top_logprobs is for log-probs; put {LOGPROBS} into include, or leave it out", "top_logprobs"
        )
    return asked


class ResponsesAnswer(Answer):
    """Writes the answer to one request in the form of Responses."""

    def __init__(
        self, asked: ResponsesRequest, chat: ChatRequest, model: str, tokenizer: Tokenizer | None
    ) -> None:
        super().__init__(chat, model, tokenizer)
        code = self.id.partition("-")[2]
        self._responses, self._model = asked, model
        self.id, self._item_id = f"resp_{code}", f"msg_{code}"
        self._created_at = int(time.time())
        self._text: list[str] = []
        self._scores: list[dict[str, Any]] = []
        self._sent = 0
        """Tokens whose log-probs are in events of pieces."""
        self._reason: str | None = None
        self._events = 0

    def whole(self, parts: Sequence[Part], numbers: dict[str, int], weight_version: int) -> dict[str, Any]:
        """Return the response."""
        self._text, self._reason = [parts[0].text], parts[0].finish_reason
        self._add_logprobs(parts[0])
        return {**self._response(numbers), "weight_version": weight_version}

    def events(self, part: Part) -> list[dict[str, Any]]:
        """Return the events of a piece; the first and the last have events around them."""
        self._add_logprobs(part)
        found = []
        place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        if part.prompt_token_ids is not None:
            begun = {"status": "in_progress", "content": []}
            found += [
                self._event_of("response.created", response=self._response(None)),
                self._event_of("response.in_progress", response=self._response(None)),
                self._event_of("response.output_item.added", output_index=0, item=self._item() | begun),
                self._event_of("response.content_part.added", **place, part=_content("", [])),
            ]
        if part.text:
            self._text.append(part.text)
            delta = {"delta": part.text, "logprobs": self._scores[self._sent :]}
            self._sent = len(self._scores)
            found.append(self._event_of("response.output_text.delta", **place, **delta))
        if part.finish_reason is not None:
            self._reason = part.finish_reason
            text, logprobs = "".join(self._text), self._scores
            found += [
                self._event_of("response.output_text.done", **place, text=text, logprobs=logprobs),
                self._event_of("response.content_part.done", **place, part=_content(text, logprobs)),
                self._event_of("response.output_item.done", output_index=0, item=self._item()),
            ]
        return found

    def closing(self, numbers: dict[str, int]) -> list[dict[str, Any]]:
        """Return the event that has the whole response."""
        response = self._response(numbers)
        return [self._event_of(f"response.{response['status']}", response=response)]

    def _add_logprobs(self, part: Part) -> None:
        if self._responses.include:
            self._scores += self.chat_logprobs(part)["content"]

    def _event_of(self, type: str, **fields: Any) -> dict[str, Any]:
        number, self._events = self._events, self._events + 1
        return {"type": type, "sequence_number": number, **fields}

    def _item(self) -> dict[str, Any]:
        content = [_content("".join(self._text), self._scores)]
        status = "completed" if self._reason == "stop" else "incomplete"
        return {
            "type": "message",
            "id": self._item_id,
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def _response(self, numbers: dict[str, int] | None) -> dict[str, Any]:
        """Return the response; without its numbers of tokens it has only begun."""
        status, why = "in_progress", None
        if numbers is not None:
            status = "completed" if self._reason == "stop" else "incomplete"
            reason = "max_output_tokens" if self._reason == "length" else self._reason
            why = {"reason": reason} if status == "incomplete" else None
        asked = self._responses
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created_at,
            "status": status,
            "model": self._model,
            "output": [] if numbers is None else [self._item()],
            "error": None,
            "incomplete_details": why,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": {},
            "parallel_tool_calls": False,
            "temperature": asked.temperature,
            "top_p": asked.top_p,
            "tool_choice": "none",
            "tools": [],
            "top_logprobs": asked.top_logprobs or 0,
            "usage": None if numbers is None else _usage(numbers),
        }


def _content(text: str, logprobs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _usage(numbers: dict[str, int]) -> dict[str, Any]:
    """Return numbers of tokens as Responses name them; OpenAI's details are not counted here, and are 0."""
    return {
        "input_tokens": numbers["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": numbers["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": numbers["total_tokens"],
    }
