"""The text of a turn becomes an action, and an observation becomes a text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from seer_core.errors import ConfigError, quote

__all__ = ["NoAction", "action_of", "content_of"]

BEGIN, END = "<tool_call>", "</tool_call>"
FENCE = "```"


class NoAction(Exception):
    """The text of a turn was to be an action, and is none; ``str(error)`` is the reason for the model."""


def action_of(text: str, field: str | None) -> dict[str, Any] | None:
    """Return the action that a turn's text is, or None for a text that is not meant as one.

    With ``field`` each text is an action.  Else it is a JSON object: behind the last ``<tool_call>``, or the
    whole text, which may stand in a fence of backquotes.  An object of ``name`` and ``arguments`` is the call
    of an MCP tool.  Raises NoAction for a text that begins as such an object and is none.
    """
    text = text.strip()
    if field is not None:
        return {field: text}
    _, marked, behind = text.rpartition(BEGIN)
    if marked:
        text = behind.partition(END)[0].strip()
    elif text.startswith(FENCE):
        text = text.partition("\n")[2].removesuffix(FENCE).strip()
    elif not text.startswith("{"):
        return None
    try:
        action = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise NoAction(f"this is no JSON: {error}") from error
    if not isinstance(action, dict):
        raise NoAction("an action is a JSON object")
    if action.keys() == {"name", "arguments"}:
        return {"type": "call_tool", "tool_name": action["name"], "arguments": action["arguments"]}
    return action


def content_of(observation: Mapping[str, Any], field: str | None) -> str:
    """Return what the model reads of an observation: a field, the result of a tool, or all but metadata.

    A text is itself, anything else its JSON.  Raises ConfigError where the observation lacks the field.
    """
    value: Any = {key: value for key, value in observation.items() if key != "metadata"}
    if field is not None:
        if field not in value:
            raise ConfigError(
                f"OpenEnv's environment answered an observation without {quote(field)}; it has"
                f" {quote(sorted(value))}: name one of them in [plugin.openenv].observation_field"
            )
        value = value[field]
    elif {"tool_name", "result"} <= value.keys():
        error = value.get("error")
        value = {"error": error.get("message")} if isinstance(error, Mapping) else _result(value["result"])
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _result(result: Any) -> Any:
    """Return the value of a tool's result, or its texts."""
    if not isinstance(result, Mapping) or "content" not in result:
        return result
    if result.get("data") is not None:
        return result["data"]
    parts = result["content"]
    return "\n".join(str(each["text"]) for each in parts if isinstance(each, Mapping) and "text" in each)
