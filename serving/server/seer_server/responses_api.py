"""OpenAI's Responses, as far as they are one answer: text, reasoning and calls, and no state between two."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from seer_host.sampling_fields import SamplingChoice

from seer_core.ports.engine import Tokenizer
from seer_server.answers import Answer, Part
from seer_server.parsing import Reading
from seer_server.protocol import (
    OWN_IDS,
    ChatRequest,
    FormatType,
    JsonSchema,
    ResponseFormat,
    convert,
)
from seer_server.responses_items import OutputItems, messages_of
from seer_server.tools import Function, NamedFunction, NamedTool, Tool, ToolChoice
from seer_server.unsupported_fields import FieldError, own_fields

__all__ = ["ResponsesAnswer", "ResponsesRequest", "parse_responses"]

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "access_programs": (),
    "background": (False,),
    "background_options": (),
    "context_management": ([],),
    "conversation": (),
    "enable_response_messages": (False,),
    "image": (),
    "include_reasoning": (True,),
    "max_tool_calls": (),
    "previous_input_messages": ([],),
    "previous_response_id": (),
    "prompt": (),
    "prompt_logprobs": (),
    "reasoning": ({}, {"summary": "auto"}),
    "stream_options": ({}, {"include_obfuscation": False}, {"include_obfuscation": True}),
    "truncation": ("disabled",),
}
"""Fields of Responses that Seer does not have, and their values that change nothing."""

LOGPROBS = "message.output_text.logprobs"
"""Stands in ``include`` where log-probs are wanted."""

Included = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
]
"""Parts of an answer that OpenAI's clients ask for; all but the first are of outputs that Seer lacks."""


class ResponsesTool(msgspec.Struct, frozen=True):
    """A function that the model may call; there are no other tools."""

    type: Literal["function"]
    """The kind of tool."""
    name: Annotated[str, Meta(min_length=1)]
    """Its name."""
    description: str | None = None
    """What it does, for the model."""
    parameters: dict[str, Any] | None = None
    """The schema of its arguments."""
    strict: bool | None = None
    """Whether arguments are held to the schema where the parser can do so."""

    @property
    def plain(self) -> Tool:
        """The tool as chats have it."""
        return Tool(Function(self.name, self.description, self.parameters, self.strict))


class ResponsesToolChoice(msgspec.Struct, frozen=True):
    """The one function that is to be called."""

    type: Literal["function"]
    """The kind of tool."""
    name: Annotated[str, Meta(min_length=1)]
    """Its name."""


class TextFormat(msgspec.Struct, frozen=True):
    """The form of the text; its name and ``strict`` change nothing."""

    type: FormatType = "text"
    """Whether it is text of any form, an object of JSON, or JSON after a schema."""
    schema: dict[str, Any] | None = None
    """The schema, with ``json_schema``."""


class TextOptions(msgspec.Struct, frozen=True):
    """Options of the text; ``verbosity`` changes nothing."""

    format: TextFormat | None = None
    """The form that it has; any without one."""


class ResponsesRequest(SamplingChoice, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of ``POST /v1/responses``."""

    input: str | list[dict[str, Any]]
    """Text of the user's, or the messages so far, with reasoning, calls and what these returned."""
    instructions: str | None = None
    """A system message before them."""
    tools: list[ResponsesTool] | None = None
    """The functions that the model may call."""
    tool_choice: Literal["none", "auto", "required"] | ResponsesToolChoice | None = None
    """Which of them it calls: ``auto``, ``none``, ``required`` or one that is named."""
    parallel_tool_calls: bool = True
    """Whether an answer may have more than one call."""
    model: str | None = None
    """The name of the model that is served; it may be left out."""
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    """The most tokens of the response."""
    text: TextOptions | None = None
    """Options of the text, such as its form."""
    include: list[Included] | None = None
    """With ``message.output_text.logprobs`` the text has log-probs of its tokens, and of as many others as
    ``top_logprobs`` says. OpenAI's other values add nothing.
    """
    stream: bool | None = None
    """Whether the text is sent as server-sent events while it is written."""
    seed: int | None = None
    """The group's seed, a field of Seer's."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the model's chat template, such as ``enable_thinking``."""
    group: str | None = None
    """The id of the group, a field of Seer's. The header ``X-Seer-Group`` gives it where this is absent."""
    trajectory: str | None = None
    """The id of the trajectory of which the request is a turn, as in chats."""
    priority: int | None = None
    """The group's label ``priority``, which strategies see. The header ``X-Seer-Priority`` gives it where
    this is absent.
    """
    prompt_logprobs: Annotated[int, Meta(ge=0, le=0)] | None = None
    """Absent: this answer has no log-probs of its prompt."""
    request_id: str | None = None
    """The id by which the request can be aborted, and that the answer has, as at vLLM's."""
    timeout_s: float | None = None
    """The response is aborted if it is not over so long after its submission; a field of Seer's."""

    def chat(self) -> ChatRequest:
        """Return the same request as a chat.

        Raises:
            FieldError: the input has something else than messages of text, reasoning and calls.
        """
        given = self.input if isinstance(self.input, list) else [{"role": "user", "content": self.input}]
        messages = messages_of(given)
        if self.instructions is not None:
            messages.insert(0, {"role": "system", "content": self.instructions})
        names = (
            "model",
            "stream",
            "seed",
            "chat_template_kwargs",
            "group",
            "trajectory",
            "priority",
            "request_id",
        )
        same = (*names, "timeout_s", *SamplingChoice.__struct_fields__)
        fields = {name: getattr(self, name) for name in same}
        tools = [each.plain for each in self.tools or ()]
        choice: ToolChoice | None
        if isinstance(self.tool_choice, ResponsesToolChoice):
            choice = NamedTool(NamedFunction(self.tool_choice.name))
        else:
            choice = self.tool_choice
        return ChatRequest(
            messages=messages,
            tools=tools,
            tool_choice=choice,
            parallel_tool_calls=self.parallel_tool_calls,
            max_tokens=self.max_output_tokens,
            response_format=self._form(),
            logprobs=self.scored,
            **fields,
        )

    @property
    def scored(self) -> bool:
        """Whether the text has log-probs."""
        return LOGPROBS in (self.include or ())

    def _form(self) -> ResponseFormat | None:
        if self.text is None or self.text.format is None:
            return None
        form = self.text.format
        return ResponseFormat(form.type, None if form.schema is None else JsonSchema(form.schema))


def parse_responses(body: bytes) -> ResponsesRequest:
    """Read a request.

    Raises:
        PromptError: it is none, or asks for what Seer does not do.
    """
    asked = convert(body, ResponsesRequest, "a response", lambda fields: own_fields(fields, NEUTRAL, OWN_IDS))
    if asked.top_logprobs and not asked.scored:
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
        self.id, self._items = asked.request_id or f"resp_{code}", OutputItems(code)
        self._created_at = int(time.time())
        self._ending: str | None = None
        self._events = 0

    @property
    def names(self) -> dict[str, str]:
        """The request's own names."""
        found = {"messages": "input", "max_tokens": "max_output_tokens"}
        if self._responses.text is not None:
            found |= dict.fromkeys(("structured_outputs", "response_format"), "text")
        return super().names | found

    def whole(self, parts: Sequence[Part], numbers: dict[str, int], weight_version: int) -> dict[str, Any]:
        """Return the response."""
        self._add(parts[0])
        return {**self._response(numbers), "weight_version": weight_version}

    def events(self, part: Part) -> list[dict[str, Any]]:
        """Return the events of a piece; the first and the last have events around them."""
        found = []
        if part.prompt_token_ids is not None:
            found += [
                self._event_of("created", {"response": self._response(None)}),
                self._event_of("in_progress", {"response": self._response(None)}),
            ]
        return found + [self._event_of(name, fields) for name, fields in self._add(part)]

    def closing(self, numbers: dict[str, int]) -> list[dict[str, Any]]:
        """Return the event that has the whole response."""
        response = self._response(numbers)
        return [self._event_of(response["status"], {"response": response})]

    def _add(self, part: Part) -> list[tuple[str, dict[str, Any]]]:
        """Add a piece to the output's items; return its events."""
        scores = self.chat_logprobs(part)["content"] if self._responses.scored else []
        if part.reading is not None:
            found = self._items.add(part.reading, scores)
        else:
            found = self._items.add(Reading(part.text), scores, plain=True)
        if part.finish_reason is None:
            return found
        self._ending = part.finish_reason
        return found + self._items.close("completed" if self._ending == "stop" else "incomplete")

    def _event_of(self, name: str, fields: dict[str, Any]) -> dict[str, Any]:
        number, self._events = self._events, self._events + 1
        return {"type": f"response.{name}", "sequence_number": number, **fields}

    def _response(self, numbers: dict[str, int] | None) -> dict[str, Any]:
        """Return the response; without its numbers of tokens it has only begun."""
        status, why = "in_progress", None
        if numbers is not None:
            status = "completed" if self._ending == "stop" else "incomplete"
            reason = "max_output_tokens" if self._ending == "length" else self._ending
            why = {"reason": reason} if status == "incomplete" else None
        asked = self._responses
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created_at,
            "status": status,
            "model": self._model,
            "output": [] if numbers is None else self._items.plain,
            "error": None,
            "incomplete_details": why,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": {},
            "parallel_tool_calls": asked.parallel_tool_calls,
            "temperature": asked.temperature,
            "top_p": asked.top_p,
            "tool_choice": msgspec.to_builtins(asked.tool_choice or ("auto" if asked.tools else "none")),
            "tools": msgspec.to_builtins(asked.tools or []),
            "top_logprobs": asked.top_logprobs or 0,
            "usage": None if numbers is None else _usage(numbers),
        }


def _usage(numbers: dict[str, int]) -> dict[str, Any]:
    """Return numbers of tokens as Responses name them; OpenAI's details are not counted here, and are 0."""
    return {
        "input_tokens": numbers["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": numbers["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": numbers["total_tokens"],
    }
