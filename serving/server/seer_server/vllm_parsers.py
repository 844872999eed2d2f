"""vLLM's parsers of calls and reasoning, as its own server uses them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from seer_core.error_origin import one_line
from seer_core.errors import ConfigError
from seer_core.model import StructuredOutputs
from seer_server.parsing import ParserNames, Reading, ToolCall, require_name
from seer_server.protocol import ChatRequest
from seer_server.unsupported_fields import FieldError

__all__ = ["VLLMParsers"]


class VLLMParsers:
    """Makes vLLM's parsers for a model.

    Args:
        names: as ``--tool-call-parser`` and ``--reasoning-parser`` of ``vllm serve`` have them.
        model_dir: has the model's tokenizer.

    Raises:
        ConfigError: there is no such parser, or it does not fit the model.
    """

    def __init__(self, names: ParserNames, model_dir: Path) -> None:
        from vllm.parser import ParserManager
        from vllm.reasoning import ReasoningParserManager
        from vllm.tokenizers import get_tokenizer
        from vllm.tool_parsers import ToolParserManager

        require_name("--tool-call-parser", names.tool_call, ToolParserManager.list_registered())
        require_name("--reasoning-parser", names.reasoning, ReasoningParserManager.list_registered())
        self.reads_calls = names.tool_call is not None
        self._tokenizer: Any = get_tokenizer(model_dir)
        try:
            self._class: Any = ParserManager.get_parser(
                tool_parser_name=names.tool_call,
                reasoning_parser_name=names.reasoning,
                enable_auto_tools=self.reads_calls,
                model_name=str(model_dir),
                tokenizer=self._tokenizer,
            )
        except Exception as error:  # a parser may raise anything at a tokenizer that it does not like
            raise ConfigError(f"{one_line(error)}; name another parser, or none") from error

    def begin(self, chat: ChatRequest, form: StructuredOutputs | None) -> VLLMReading:
        """Return how the answers to a request are read.

        Raises:
            FieldError: vLLM refuses its tools.
        """
        return VLLMReading(self._class, self._tokenizer, chat, form)


class VLLMReading:
    """How vLLM's parsers read the answers to one request."""

    def __init__(
        self, parser_class: Any, tokenizer: Any, chat: ChatRequest, form: StructuredOutputs | None
    ) -> None:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        self.form = form
        request_class: Any = ChatCompletionRequest
        self._class, self._tokenizer = parser_class, tokenizer
        self._template_kwargs = dict(chat.chat_template_kwargs or {})
        self._forced = chat.calls not in ("none", "auto")
        fields: dict[str, Any] = {
            "messages": [],
            "tool_choice": msgspec.to_builtins(chat.calls),
            "parallel_tool_calls": chat.parallel_tool_calls,
            "include_reasoning": chat.include_reasoning,
            "chat_template_kwargs": self._template_kwargs,
        }
        if chat.tools:
            fields["tools"] = [each.plain for each in chat.tools]
        if form is not None:
            fields["structured_outputs"] = msgspec.to_builtins(form)
        try:
            self._request = request_class.model_validate(fields)
            self._request.messages = chat.messages  # for the ids of calls; they are not checked again
            if chat.calls != "none" or parser_class.reasoning_parser_cls is not None:
                self._request = self._parser().adjust_request(self._request)
                self.form = _form_of(self._request.extract_structured_outputs())
        except Exception as error:  # schemas are hostile, and xgrammar raises RuntimeErrors
            self._check_template_kwargs()
            raise FieldError(f"the tools are refused: {_reason(error)}", "tools") from error
        self.special_tokens = not self._request.skip_special_tokens

    def reasoning_end(self, prompt: Sequence[int]) -> str | None:
        """Return the text that ends the reasoning after this prompt; None where none is expected."""
        parser = self._parser()
        if parser.reasoning_parser is None or not self._request.include_reasoning:
            return None
        end: str | None = parser.reasoning_parser.reasoning_end_str
        return None if parser.is_reasoning_end(list(prompt)) else end

    def reader(self, prompt: Sequence[int]) -> VLLMReader:
        """Return a reader of one more answer to this prompt."""
        return VLLMReader(self._parser(), self._request, list(prompt), self._forced)

    def _check_template_kwargs(self) -> None:
        try:
            self._class(self._tokenizer, None, chat_template_kwargs=self._template_kwargs)
        except Exception as error:  # parsers compare and convert what clients send
            field = "chat_template_kwargs"
            raise FieldError(f"the parsers refuse {field}: {_reason(error)}", field) from error

    def _parser(self) -> Any:
        tools = self._request.tools
        return self._class(self._tokenizer, tools, chat_template_kwargs=self._template_kwargs)


class VLLMReader:
    """Reads one answer by one of vLLM's parsers."""

    def __init__(self, parser: Any, request: Any, prompt: list[int], forced: bool) -> None:
        self._parser, self._request, self._prompt, self._forced = parser, request, prompt, forced

    def read(self, text: str, token_ids: Sequence[int]) -> Reading:
        """Return the parts of a whole answer."""
        self._parser.set_prompt_token_ids(self._prompt)
        reasoning, content, calls = self._parser.parse(
            text, self._request, enable_auto_tools=True, model_output_token_ids=list(token_ids)
        )
        if not self._request.include_reasoning:
            reasoning = None
        found = [ToolCall(at, each.arguments, each.name, each.id) for at, each in enumerate(calls or ())]
        return Reading((content or "") if self._forced else content, reasoning, found)

    def read_piece(self, text: str, token_ids: Sequence[int], *, last: bool) -> Reading:
        """Return the parts that the next tokens bring."""
        delta = self._parser.parse_delta(text, list(token_ids), self._request, self._prompt, finished=last)
        if delta is None:
            return Reading()
        calls = []
        for each in delta.tool_calls:
            function = each.function
            name, arguments = (None, None) if function is None else (function.name, function.arguments)
            calls.append(ToolCall(each.index, arguments or "", name, each.id))
        return Reading(delta.content, delta.reasoning, calls)


def _form_of(params: Any) -> StructuredOutputs | None:
    """Return a form of vLLM's as Seer has it."""
    if params is None:
        return None
    fields = {name: getattr(params, name) for name in StructuredOutputs.__struct_fields__}
    given = {name: value for name, value in fields.items() if value is not None}
    return msgspec.convert(given, StructuredOutputs) if given else None


def _reason(error: Exception) -> str:
    """Return why vLLM refuses a request; of pydantic's errors the first."""
    details = getattr(error, "errors", None)
    if callable(details):
        first = details()[0]
        return str(first["msg"])
    return one_line(error)
