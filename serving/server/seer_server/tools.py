"""Tools of a chat, as OpenAI has them: which there are, which are to be called, and calls in messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from seer_core.errors import quote
from seer_server.unsupported_fields import FieldError

__all__ = ["Function", "NamedFunction", "NamedTool", "Tool", "ToolChoice", "tool_choice_of"]

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
