"""Requests in the form of OpenAI's completions and chats, with additions of vLLM's and Seer's."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta
from seer_host.json_files import describe_flaw, lone_surrogate
from seer_host.sampling_fields import MOST_TOP_LOGPROBS, SamplingChoice

from seer_core.errors import PromptError, printable
from seer_core.model import MOST_RESPONSES, StructuredOutputs
from seer_core.model.sampling import CONTROLS
from seer_server.tools import Tool, ToolChoice, tool_choice_of
from seer_server.unsupported_fields import IN_CHATS, IN_COMPLETIONS, FieldError, own_fields

__all__ = [
    "AbortIdsRequest",
    "AbortOneRequest",
    "ChatRequest",
    "CompletionRequest",
    "DetokenizeRequest",
    "GenerationRequest",
    "StreamOptions",
    "convert",
    "error_body",
    "kind_of",
    "parse",
    "records",
    "skipped_tokens",
]

LONGEST_FAULT = 300
"""Characters of an error that quotes what a client sent."""

OWN_IDS = ("request_id",)
"""Fields that other forms of requests ignore."""

MOST_PROMPTS = 65_536
"""Of one request."""


FIELDS = (re.compile(r"at `\$\.(\w+)"), re.compile(r"(?:unknown|required) field `(\w+)"))
"""The field that an error of msgspec's is about, which of a field within it names that one as well."""


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of a stream, as OpenAI has them, and one of Seer's."""

    include_usage: bool | None = None
    """Whether the numbers of tokens follow in an event after the last choice's."""
    continuous_usage_stats: bool | None = None
    """Whether each event has the numbers of its choice so far, with ``include_usage``; a field of vLLM's."""
    include_obfuscation: bool | None = None
    """Changes nothing: no event is padded."""
    skip_tokens: list[Annotated[int, Meta(ge=0)]] | None = None
    """Tokens of each choice that the client has of a stream that broke off; this one begins after them."""


FormatType = Literal["text", "json_object", "json_schema"]
"""The forms of an answer, as OpenAI names them."""


class JsonSchema(msgspec.Struct, frozen=True):
    """A schema as OpenAI has it; its name, its description and ``strict`` change nothing."""

    schema: dict[str, Any]
    """The schema of JSON."""


class ResponseFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The form of an answer, as OpenAI has it."""

    type: FormatType
    """Whether it is text of any form, an object of JSON, or JSON after a schema."""
    json_schema: JsonSchema | None = None
    """The schema, with ``type`` ``json_schema``."""

    @property
    def form(self) -> StructuredOutputs | None:
        """Return the same as Seer has it.

        Raises:
            FieldError: the schema is missing.
        """
        if self.type == "text":
            return None
        if self.type == "json_object":
            return StructuredOutputs(json_object=True)
        if self.json_schema is None:
            raise FieldError("response_format has no json_schema; give one", "response_format")
        return StructuredOutputs(json=self.json_schema.schema)


class GenerationRequest(SamplingChoice, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The fields that completions and chats share.

    An absent field has the value of ``[rollout]``, but for ``n``.
    """

    model: str | None = None
    """The name of the model that is served; it may be left out."""
    n: Annotated[int, Meta(ge=1, le=MOST_RESPONSES)] = 1
    """How many responses are wanted for each prompt."""
    max_tokens: int | None = None
    """The most tokens of each response."""
    seed: int | None = None
    """The group's seed. In front of servers the responses have the seeds that a server alone gives them."""
    response_format: ResponseFormat | None = None
    """The form of the answer, as OpenAI has it."""
    stream: bool | None = None
    """Whether the tokens are sent as server-sent events while they are written."""
    stream_options: StreamOptions | None = None
    """Options of the stream."""
    return_token_ids: bool | None = None
    """Whether the answer has token ids beside the text; a field of vLLM's."""
    return_tokens_as_token_ids: bool | None = None
    """Whether log-probs name tokens as ``token_id:17``, and not by their words; a field of vLLM's."""
    group: str | None = None
    """The id of the group, a field of Seer's. The header ``X-Seer-Group`` gives it where this is absent."""
    trajectory: str | None = None
    """The id of the trajectory of which the request is a turn, a field of Seer's. A header gives it where
    this is absent: ``X-Seer-Trajectory``, or that of another system. ``group`` is then a group of
    trajectories.
    """
    priority: int | None = None
    """The group's label ``priority``, which strategies see; a field of Seer's. The header ``X-Seer-Priority``
    gives it where this is absent.
    """
    timeout_s: float | None = None
    """Responses that are not over so long after their submission are aborted; a field of Seer's."""
    family: str | None = None
    """The family of the request, a field of Seer's: requests of a family are siblings, as the responses of
    one group are. The header ``X-Seer-Family`` gives it where this is absent. In front of servers that run
    already requests of one prompt are a family without it.
    """

    request_id: str | None = None
    """The id by which the request can be aborted; the answer has it behind the kind of request, as at vLLM's.
    """
    rid: str | None = None
    """The id by which the request can be aborted, and that the answer has, as at SGLang's."""
    attachments: dict[str, Any] | None = None
    """Further fields that go to servers unread with each chunk, where engines are servers; a field of Seer's.
    """

    def tops(self, controls: Collection[str]) -> int | None:
        """Return how many of the most probable tokens are wanted for each token, of engines with these."""
        return self.top_logprobs

    def prompts(self) -> list[dict[str, Any]]:
        """Return the part of each record that is the prompt, as ``Runtime.groups`` takes it.

        Raises:
            PromptError: there is none.
        """
        raise NotImplementedError

    @property
    def most_tokens(self) -> int | None:
        """Tokens that a response may have; None where the request has no bound."""
        return self.max_tokens

    @property
    def of_prompt(self) -> int | None:
        """How many of the most probable tokens are wanted with each of the prompt's; None without any."""
        return self.prompt_logprobs

    @property
    def form(self) -> StructuredOutputs | None:
        """The form that the answer must have, in whichever field.

        Raises:
            FieldError: two are given, or the schema is missing.
        """
        form = None if self.response_format is None else self.response_format.form
        if form is not None and self.structured_outputs is not None:
            raise FieldError("give response_format or structured_outputs, and not both", "response_format")
        return form or self.structured_outputs


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    """The body of ``POST /v1/completions``."""

    prompt: str | list[Any]
    """Text, a list of token ids, or a list of either."""
    logprobs: Annotated[int, Meta(ge=0, le=MOST_TOP_LOGPROBS)] | None = None
    """Log-probs of the sampled tokens, and of so many of the most probable ones in the place of each. With 1,
    an engine that has no ``top_logprobs`` answers with those of the sampled tokens alone.
    """

    echo: bool = False
    """Whether text and log-probs begin with those of the prompt. Then ``max_tokens`` may be 0."""

    @property
    def most_tokens(self) -> int | None:
        """Tokens that a response may have: one where none is wanted besides the prompt."""
        return 1 if self.echoes_alone else self.max_tokens

    @property
    def echoes_alone(self) -> bool:
        """Whether the answer has the prompt, and nothing of a response."""
        return self.echo and self.max_tokens == 0

    @property
    def of_prompt(self) -> int | None:
        """``prompt_logprobs``, or else ``logprobs`` if there is an echo."""
        return self.logprobs if self.echo and self.prompt_logprobs is None else self.prompt_logprobs

    def tops(self, controls: Collection[str]) -> int | None:
        """Return ``top_logprobs``, or else ``logprobs``.

        Raises:
            FieldError: the engines have log-probs of sampled tokens alone.
        """
        if self.top_logprobs is None and "top_logprobs" in controls:
            return self.logprobs
        if "top_logprobs" not in controls and (self.logprobs or 0) > 1:
            raise FieldError(
                "this engine has log-probs of sampled tokens alone; give 0 for logprobs", "logprobs"
            )
        return self.top_logprobs

    def prompts(self) -> list[dict[str, Any]]:
        """Return text or token ids of each prompt."""
        prompts: Sequence[Any] = self.prompt if isinstance(self.prompt, list) else [self.prompt]
        if prompts and all(type(each) is int for each in prompts):
            prompts = [prompts]
        if not prompts or not all(isinstance(each, str | list) for each in prompts):
            raise PromptError("prompt must be text, a list of token ids, or a list of either")
        if len(prompts) > MOST_PROMPTS:
            raise PromptError(f"{len(prompts):,} prompts in one request; it may have {MOST_PROMPTS:,}")
        return [{"prompt" if isinstance(each, str) else "prompt_token_ids": each} for each in prompts]


class ChatRequest(GenerationRequest, frozen=True, kw_only=True):
    """The body of ``POST /v1/chat/completions``."""

    messages: list[dict[str, Any]]
    """The messages of the chat, each with a ``role`` and a ``content`` of text. An assistant's may have
    ``tool_calls`` and ``reasoning``, and those of the role ``tool`` have what a call returned.
    """
    tools: list[Tool] | None = None
    """The functions that the model may call."""
    tool_choice: ToolChoice | None = None
    """Which of them it calls: ``auto``, ``none``, ``required`` or one that is named."""
    parallel_tool_calls: bool = True
    """Whether an answer may have more than one call."""
    include_reasoning: bool = True
    """Whether the answer has the reasoning, where a parser finds it; a field of vLLM's."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the model's chat template, such as ``enable_thinking``; a field of vLLM's."""
    max_completion_tokens: int | None = None
    """The most tokens of each response; it goes before ``max_tokens``, its old name."""
    logprobs: bool | None = None
    """Whether the answer has log-probs of the sampled tokens, and of as many others as ``top_logprobs`` says.
    """

    def prompts(self) -> list[dict[str, Any]]:
        """Return the messages, which the model's template makes one prompt of."""
        prompt: dict[str, Any] = {"messages": self.messages}
        variables = dict(self.chat_template_kwargs or {})
        if self.tools:
            variables["tools"] = [each.plain for each in self.tools]
        if variables:
            prompt["chat_template_kwargs"] = variables
        return [prompt]

    @property
    def calls(self) -> ToolChoice:
        """Which tools are to be called; ``none`` where there are none.

        Raises:
            FieldError: no tool has the name, or there are no tools.
        """
        return tool_choice_of(self.tools, self.tool_choice)

    @property
    def most_tokens(self) -> int | None:
        """Tokens that a response may have: ``max_completion_tokens``, or its old name."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class AbortIdsRequest(msgspec.Struct, frozen=True):
    """The body of ``POST /abort_requests``, as vLLM has it."""

    request_ids: list[str] = []
    """The ids that the answers would have; empty for all requests."""


class AbortOneRequest(msgspec.Struct, frozen=True):
    """The body of ``POST /abort_request``, as SGLang has it."""

    rid: str | None = None
    """The id of the request."""
    abort_all: bool = False
    """Whether all requests are aborted."""


class DetokenizeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of ``POST /detokenize``."""

    tokens: list[Annotated[int, Meta(ge=0)]]
    """Token ids."""
    model: str | None = None
    """The name of the model that is served; it may be left out."""


A = TypeVar("A", bound=GenerationRequest)
S = TypeVar("S", bound=msgspec.Struct)


def kind_of(body: bytes) -> type[GenerationRequest]:
    """Return of which kind a request is that may be of either."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return CompletionRequest
    return ChatRequest if "messages" in fields else CompletionRequest


def parse(body: bytes, kind: type[A]) -> A:
    """Read a request.

    Raises:
        PromptError: it is none, or asks for what Seer does not do.
    """
    what, further = ("a chat", IN_CHATS) if kind is ChatRequest else ("completions", IN_COMPLETIONS)
    asked = convert(body, kind, what, lambda fields: own_fields(fields, further, OWN_IDS))
    if asked.top_logprobs and getattr(asked, "logprobs", None) in (None, False):
        raise FieldError(
            "top_logprobs is for log-probs; set logprobs as well, or leave it out", "top_logprobs"
        )
    return asked


def convert(body: bytes, kind: type[S], what: str, own: Callable[[dict[str, Any]], dict[str, Any]]) -> S:
    """Read a request for ``what`` of any kind; ``own`` returns its fields without those that change nothing.

    Raises:
        PromptError: it is none, or asks for what Seer does not do.
    """
    try:
        asked = msgspec.convert(own(msgspec.json.decode(body, type=dict[str, Any])), kind, str_keys=True)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        is_json = isinstance(error, msgspec.ValidationError)
        flaw = error if is_json else describe_flaw(error, body)
        fault = printable(f"the body is no request for {what}: {flaw}", LONGEST_FAULT)
        named = (each.search(str(error)) for each in FIELDS if is_json)
        field = next((found[1] for found in named if found), None)
        raise FieldError(fault, field if is_json else _field_of_surrogate(body)) from None
    if getattr(asked, "stream_options", None) is not None and not getattr(asked, "stream", None):
        raise PromptError("stream_options is for streams; set stream as well, or leave it out")
    return asked


def _field_of_surrogate(body: bytes) -> str | None:
    """Return the first field with half a pair of surrogates, which Python's decoder reads, if one has it."""
    if not lone_surrogate(body):
        return None
    try:
        fields = json.loads(body)
        written = {name: json.dumps(value).encode() for name, value in fields.items()}
    except (ValueError, RecursionError, AttributeError):
        return None
    return next((printable(name) for name, value in written.items() if lone_surrogate(value)), None)


def skipped_tokens(asked: GenerationRequest, choices: int) -> list[int]:
    """Return after how many tokens of each choice the stream begins.

    Raises:
        PromptError: another number of choices is named, or the same tokens would not come again.
    """
    skip = asked.stream_options.skip_tokens if asked.stream_options is not None else None
    if skip is None:
        return [0] * choices
    if len(skip) != choices:
        raise PromptError(f"skip_tokens has {len(skip)} numbers for {choices} choices; give one for each")
    if asked.of_prompt is not None or getattr(asked, "echo", False):
        words = (
            "skip_tokens is for streams that go on behind their prompts; leave echo and prompt_logprobs out"
        )
        raise FieldError(words, "stream_options")
    if asked.seed is None and (asked.group is None or asked.trajectory is not None):
        named = "the seed" if asked.trajectory is not None else "the group or the seed"
        raise PromptError(f"skip_tokens is for tokens that come again; name {named} they had")
    return skip


def records(
    asked: GenerationRequest, group: str, controls: Collection[str] = CONTROLS
) -> list[dict[str, Any]]:
    """Return a record for each prompt, as ``Runtime.groups`` takes them; ``group`` names it, or each in turn.

    ``controls`` are the fields of sampling that the engines have.

    Raises:
        PromptError: there is no prompt, or the engines do not have what is asked for.
    """
    prompts = asked.prompts()
    common: dict[str, Any] = {
        name: getattr(asked, name) for name in ("n", "seed", "timeout_s", *SamplingChoice.__struct_fields__)
    }
    common["max_tokens"] = asked.most_tokens
    common["top_logprobs"], common["prompt_logprobs"] = asked.tops(controls), asked.of_prompt
    common["structured_outputs"] = asked.form
    if asked.attachments:
        common["attachments"] = asked.attachments
    if asked.family is not None:
        common["family"] = asked.family
    if asked.priority is not None:
        common["labels"] = {"priority": str(asked.priority)}
    return [
        {**common, **prompt, "group_id": group if len(prompts) == 1 else f"{group}-{number}"}
        for number, prompt in enumerate(prompts)
    ]


def error_body(message: str, kind: str, code: int, param: str | None = None) -> dict[str, Any]:
    """Return an error as OpenAI's clients understand it; ``param`` is the field at fault."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
