"""Tools of a chat, as OpenAI has them: which there are, which are to be called, and calls in messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from seer_core.errors import quote
from seer_server.neutral import FieldError

__all__ = ["Function", "NamedFunction", "NamedTool", "Tool", "ToolChoice", "plain_calls", "tool_choice_of"]

Name = Annotated[str, Meta(min_length=1)]


class Function(msgspec.Struct, frozen=True):
    """A function that the model may call."""

    name: Name
    """Its name."""
    description: str | None = None
    """What it does, for the model."""
    parameters: dict[str, Any] | None = None
    """The schema of its arguments."""
    strict: bool | None = None
    """Whether arguments are held to the schema where the parser can do so."""


class Tool(msgspec.Struct, frozen=True):
    """A tool of a chat; there are no others than functions."""

    function: Function
    """The function."""
    type: Literal["function"] = "function"
    """The kind of tool."""

    @property
    def plain(self) -> dict[str, Any]:
        """The tool as chat templates receive it from vLLM."""
        function = msgspec.structs.asdict(self.function)
        if self.function.strict is None:
            del function["strict"]
        return {"type": self.type, "function": function}


class NamedFunction(msgspec.Struct, frozen=True):
    """The name of a function."""

    name: Name
    """Its name."""


class NamedTool(msgspec.Struct, frozen=True):
    """The one tool that is to be called."""

    function: NamedFunction
    """The function."""
    type: Literal["function"] = "function"
    """The kind of tool."""


ToolChoice = Literal["none", "auto", "required"] | NamedTool
"""Which tools are called: none, those that the model chooses, at least one, or one by its name."""


def tool_choice_of(tools: Sequence[Tool] | None, choice: ToolChoice | None) -> ToolChoice:
    """Return which tools of a request are to be called; without a word about it the model chooses.

    Raises:
        FieldError: the tool that is named is none of the request's, or there are none to choose from.
    """
    if not tools:
        if choice in (None, "none", "auto"):
            return "none"
        raise FieldError("tool_choice is for tools; give tools, or leave it out", "tool_choice")
    if isinstance(choice, NamedTool) and all(each.function.name != choice.function.name for each in tools):
        name = quote(choice.function.name)
        raise FieldError(f"tool_choice names {name}, and no tool has that name", "tool_choice")
    return choice or "auto"


def plain_calls(number: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """Return an assistant's message as chat templates want it: arguments of its calls are objects.

    As in vLLM, arguments that are no object of JSON are an empty one, so that a chat goes on after a call
    that was cut; content that is null is empty, and reasoning has both its names.

    Raises:
        FieldError: it has calls that are none of functions.
    """
    plain = dict(message)
    if plain.get("content") is None:
        plain["content"] = ""
    if isinstance(plain.get("reasoning"), str):
        plain["reasoning_content"] = plain["reasoning"]
    calls = plain.pop("tool_calls", None)
    if not calls:
        return plain
    if not isinstance(calls, list):
        raise FieldError(f"tool_calls of message {number} are no list; give a list of calls", "messages")
    plain["tool_calls"] = [_plain_call(number, call) for call in calls]
    return plain


def _plain_call(number: int, call: object) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not (isinstance(call, dict) and isinstance(function, dict) and isinstance(function.get("name"), str)):
        raise FieldError(f"message {number} has a call without the name of a function; give one", "messages")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments)
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
            arguments = {}
    return {**call, "function": {**function, "arguments": arguments if isinstance(arguments, dict) else {}}}
