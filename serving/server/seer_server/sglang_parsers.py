"""SGLang's parsers of calls and reasoning, as its own server uses them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from seer_core.error_origin import one_line
from seer_core.model import StructuredOutputs
from seer_server.parsing import ParserNames, Reading, ToolCall, require_name
from seer_server.protocol import ChatRequest
from seer_server.unsupported_fields import FieldError

__all__ = ["SGLangParsers"]

END_TOKENS = 64
"""The last tokens of a prompt, in which its template opens or closes the reasoning."""


class SGLangParsers:
    """Makes SGLang's parsers for a model.

    Args:
        names: as ``--tool-call-parser`` and ``--reasoning-parser`` of SGLang's server have them.
        model_dir: has the model's tokenizer.

    Raises:
        ConfigError: there is no such parser.
    """

    def __init__(self, names: ParserNames, model_dir: Path) -> None:
        from sglang.srt.function_call.function_call_parser import FunctionCallParser
        from sglang.srt.parser.reasoning_parser import ReasoningParser
        from transformers import AutoTokenizer

        require_name("--tool-call-parser", names.tool_call, list(FunctionCallParser.ToolCallParserEnum))
        require_name("--reasoning-parser", names.reasoning, list(ReasoningParser.DetectorMap))
        self.reads_calls = names.tool_call is not None
        self._names = names
        tokenizer: Any = AutoTokenizer
        self._tokenizer: Any = tokenizer.from_pretrained(model_dir)

    def begin(self, chat: ChatRequest, form: StructuredOutputs | None) -> SGLangReading:
        """Return how the answers to a request are read.

        Raises:
            FieldError: SGLang refuses its tools.
        """
        return SGLangReading(self._names, self._tokenizer, chat, form)


class SGLangReading:
    """How SGLang's parsers read the answers to one request."""

    def __init__(
        self, names: ParserNames, tokenizer: Any, chat: ChatRequest, form: StructuredOutputs | None
    ) -> None:
        from sglang.srt.entrypoints.openai.protocol import Tool, ToolChoice
        from sglang.srt.function_call.utils import get_json_schema_constraint

        self.form = form
        self._names, self._tokenizer = names, tokenizer
        self._template_kwargs = dict(chat.chat_template_kwargs or {})
        self._include_reasoning = chat.include_reasoning
        self._tools: list[Any] = []
        self._plain_json = False
        self._choice: Any = chat.calls
        if chat.calls == "none" or names.tool_call is None:
            self.special_tokens = False
            return
        self.special_tokens = True
        required = chat.calls != "auto"
        if not isinstance(chat.calls, str):
            self._choice = ToolChoice(function={"name": chat.calls.function.name})
        try:
            self._tools = [Tool(**each.plain) for each in chat.tools or ()]
            parser = self._call_parser()
            single = chat.parallel_tool_calls
            constraint = parser.get_structure_constraint(self._choice, parallel_tool_calls=single)
            self._plain_json = required and not parser.owns_tool_format()
            if constraint is None and required and not parser.detector.parses_required_natively():
                schema = get_json_schema_constraint(self._tools, self._choice, parallel_tool_calls=single)
                constraint = ("json_schema", schema)
            if constraint is not None:
                self.form = _form_of(*constraint)
        except Exception as error:  # schemas are hostile, and the detectors raise what they like
            raise FieldError(f"the tools are refused: {one_line(error)}", "tools") from error

    def reasoning_end(self, prompt: Sequence[int]) -> str | None:
        """Return the text that ends the reasoning after this prompt; None where none is expected."""
        if not self._include_reasoning or not self._thinks(prompt):
            return None
        return str(self._reasoning_parser(forced=True).detector.think_end_token)

    def reader(self, prompt: Sequence[int]) -> SGLangReader:
        """Return a reader of one more answer to this prompt."""
        from sglang.srt.function_call.json_array_parser import JsonArrayParser

        reasoning = calls = None
        if self._names.reasoning is not None:
            reasoning = self._reasoning_parser(forced=self._thinks(prompt))
        if self._tools:
            calls = JsonArrayParser() if self._plain_json else self._call_parser()
        return SGLangReader(reasoning, calls, self._tools, self._include_reasoning)

    def _thinks(self, prompt: Sequence[int]) -> bool:
        """Return whether reasoning is expected: by the end of the prompt, or else as the detector expects."""
        if self._names.reasoning is None:
            return False
        detector = self._reasoning_parser(forced=None).detector
        end = self._tokenizer.decode(list(prompt[-END_TOKENS:])).rstrip()
        if end.endswith((detector.think_start_token, detector.think_end_token)):
            return bool(end.endswith(detector.think_start_token))
        mode = detector.reasoning_default
        if mode in ("thinking", "enable_thinking"):
            return self._template_kwargs.get(mode) is not False
        if mode in ("explicit_thinking", "explicit_enable_thinking"):
            return self._template_kwargs.get(mode.removeprefix("explicit_")) is True
        return bool(mode == "always")

    def _reasoning_parser(self, forced: bool | None) -> Any:
        from sglang.srt.parser.reasoning_parser import ReasoningParser

        return ReasoningParser(
            self._names.reasoning,
            force_reasoning=forced,
            tokenizer=self._tokenizer,
            tool_call_parser_active=bool(self._tools),
        )

    def _call_parser(self) -> Any:
        from sglang.srt.function_call.function_call_parser import FunctionCallParser

        name = self._names.tool_call
        return FunctionCallParser(self._tools, name, tokenizer=self._tokenizer, tool_choice=self._choice)


class SGLangReader:
    """Reads one answer by SGLang's parsers: ``reasoning`` first, and ``calls`` in what is left."""

    def __init__(self, reasoning: Any, calls: Any, tools: list[Any], include_reasoning: bool) -> None:
        self._reasoning, self._calls = reasoning, calls
        self._tools, self._include_reasoning = tools, include_reasoning
        self._array = calls is not None and not hasattr(calls, "parse_non_stream")

    def read(self, text: str, token_ids: Sequence[int]) -> Reading:
        """Return the parts of a whole answer."""
        reasoning = None
        if self._reasoning is not None:
            reasoning, text = self._reasoning.parse_non_stream(text)
        if self._calls is None:
            return self._reading(text, reasoning, ())
        if self._array:
            found = json.loads(text)
            calls = [
                ToolCall(at, json.dumps(each.get("parameters", {}), ensure_ascii=False), each["name"])
                for at, each in enumerate(found if isinstance(found, list) else [found])
            ]
            return self._reading("", reasoning, calls)
        content, items = self._calls.parse_non_stream(text)
        calls = [ToolCall(at, each.parameters, each.name) for at, each in enumerate(items)]
        return self._reading(content, reasoning, calls)

    def read_piece(self, text: str, token_ids: Sequence[int], *, last: bool) -> Reading:
        """Return the parts that the next tokens bring."""
        reasoning = ""
        if self._reasoning is not None:
            found = self._all_of(self._reasoning, text, last)
            reasoning = "".join(thought or "" for thought, _ in found)
            text = "".join(rest or "" for _, rest in found)
        if self._calls is None:
            return self._reading(text, reasoning, ())
        if self._array:
            results = [self._calls.parse_streaming_increment(text, self._tools)]
            results += [self._calls.finish(self._tools)] if last else []
            found = [(each.normal_text, each.calls) for each in results]
        else:
            found = self._all_of(self._calls, text, last)
        content = "".join(rest or "" for rest, _ in found)
        return self._reading(content, reasoning, _pieces([call for _, calls in found for call in calls]))

    @staticmethod
    def _all_of(parser: Any, text: str, last: bool) -> list[tuple[Any, Any]]:
        """Return the pairs of parts that a parser finds, in the end with those that it held back."""
        return [parser.parse_stream_chunk(text), *([parser.parse_stream_end()] if last else [])]

    def _reading(self, content: str | None, reasoning: str | None, calls: Sequence[ToolCall]) -> Reading:
        return Reading(content or None, (reasoning or None) if self._include_reasoning else None, calls)


def _pieces(items: Sequence[Any]) -> list[ToolCall]:
    """Return pieces of calls, of which each first one has an id."""
    from seer_server.choices import new_call_id

    return [
        ToolCall(each.tool_index, each.parameters, each.name, new_call_id() if each.name else None)
        for each in items
    ]


def _form_of(kind: str, value: Any) -> StructuredOutputs:
    """Return what constrains calls as Seer has it."""
    if kind == "json_schema":
        return StructuredOutputs(json=value)
    if kind == "full_assistant_ebnf":
        return StructuredOutputs(grammar=value)
    tag = value if isinstance(value, dict) else value.model_dump(by_alias=True)
    if "structures" in tag:
        tags = [
            {
                "type": "tag",
                "begin": each["begin"],
                "content": {"type": "json_schema", "json_schema": each.get("schema") or {}},
                "end": each["end"],
            }
            for each in tag["structures"]
        ]
        triggered = {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags}
        some = {"at_least_one": bool(tag.get("at_least_one"))}
        tag = {"type": "structural_tag", "format": {**triggered, **some}}
    return StructuredOutputs(structural_tag=msgspec.json.encode(tag).decode())
