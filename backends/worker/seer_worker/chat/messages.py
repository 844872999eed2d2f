"""One reading of a chat's messages: as vLLM 0.32 hands them to a template, or a refusal of what is no text.

Prompts files, the Python API, the server and environments use it, so equal messages are equal prompts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from seer_host.images import IMAGE_PART

from seer_core.errors import PromptError, quote

__all__ = ["ContentFormat", "content_format", "prepare", "texts_of"]

ContentFormat = Literal["string", "openai"]
"""What a template reads as the content of a message: one text, or a list of parts."""

TEXT_FIELDS = {
    **dict.fromkeys(("text", "input_text", "output_text"), "text"),
    "refusal": "refusal",
    "thinking": "thinking",
}
"""The types of parts that are text, and the field that has it."""

MEDIA = re.compile("(?:^|_)(?:image|audio|video|file|embeds)(?:_|$)")
"""Words in the names of parts' types and fields that are no text."""

OF_PARTS = {
    "type",
    "text",
    "refusal",
    "thinking",
    "closed",
    "name",
    "data",
    "uuid",
    "prompt_cache_breakpoint",
}
"""Fields of parts that vLLM does not hand on; a template receives all others."""

OF_MESSAGES = {
    *("role", "content", "name", "task", "tools", "tool_calls", "tool_call_id"),
    *("reasoning", "reasoning_content"),
}
"""Fields of messages that have a meaning of their own."""

GENERATION = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")
"""A tag of transformers' own, which encloses what the model has written."""

BILLING = "x-anthropic-billing-header"
"""Begins a line of Claude Code's that vLLM leaves out, since it differs from request to request."""


def prepare(messages: Sequence[Mapping[str, Any]], template_source: str) -> list[dict[str, Any]]:
    """Return messages as a chat template receives them; those that are given stay as they are.

    - Content in parts becomes one text with a line for each part, or stays a list of parts where the template
      reads one; that of a tool does so only if it has an image.
    - Null content of an assistant's message is empty. Arguments of its calls become an object, which is empty
      where they are none, so that a chat goes on after a call that was cut; reasoning has both its names.
    - Messages of the role ``developer`` are the system's where the template lacks that role; all messages of
      the system are then one, at the beginning.
    - ``IMAGE_PART`` stays, where the template reads parts.
    - Fields that Seer does not read are handed on, as transformers does.

    Raises:
        PromptError: a message is none, or has something else than text; the number of the first is 0.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise PromptError(f"messages are {quote(messages)}; give a list of them")
    form = content_format(template_source)
    read = [_message(number, each, form) for number, each in enumerate(messages)]
    if all(each["role"] != "developer" for each in read) or _has_developer(template_source):
        return read
    for number, each in enumerate(read):
        if each["role"] == "developer" and each["tools"]:
            raise PromptError(
                f"message {number} has tools of its own, which this chat template cannot show; give them as"
                " tools in chat_template_kwargs"
            )
    return _with_one_system([_as_system(each) for each in read])


def texts_of(messages: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return the texts that the content of each message has: one, several in parts, or none.

    The text of an image is empty.

    Raises:
        PromptError: as ``prepare``.
    """
    for number, each in enumerate(messages):
        _message(number, each, "openai")
    return [[text for text, _ in _parts(number, each)] for number, each in enumerate(messages)]


def _message(number: int, message: Any, form: ContentFormat) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise PromptError(f"message {number} is {quote(message)}; give a mapping with a role and a content")
    role = message.get("role")
    if not isinstance(role, str):
        raise PromptError(f"message {number} has no role; give it one: system, user, assistant or tool")
    if message.get("content") is None and role != "assistant":
        raise PromptError(
            f"message {number}, of role {quote(role)}, has no content; give it text, or leave it out"
        )
    parts = list(_parts(number, message))
    texts = [text for text, further in parts if further is not IMAGE_PART]
    read: dict[str, Any] = {"role": role, "content": "\n".join(texts)}
    if form == "openai" and (role != "tool" or len(texts) < len(parts)):
        read["content"] = [
            {**further} if further is IMAGE_PART else {"type": "text", "text": text, **further}
            for text, further in parts
        ]
    elif len(texts) < len(parts):
        raise PromptError(
            f"message {number}, of role {quote(role)}, has an image, which this chat template does not show"
            " there; leave it out"
        )
    if role == "assistant":
        read |= _of_assistant(number, message)
    elif role == "tool" and "tool_call_id" in message:
        read["tool_call_id"] = message["tool_call_id"]
    elif role == "developer":
        read["tools"] = message.get("tools")
    read |= {name: message[name] for name in ("name", "task") if isinstance(message.get(name), str)}
    return read | {
        name: value for name, value in message.items() if name not in OF_MESSAGES and value is not None
    }


def _parts(number: int, message: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the text of each part, and the part's fields that have no meaning of their own."""
    content = message.get("content")
    content = [] if content is None else [content] if isinstance(content, str) else content
    if isinstance(content, bytes | Mapping) or not isinstance(content, Sequence):
        raise PromptError(f"message {number} has the content {quote(content)}; give text or a list of parts")
    for part in content:
        text, further = (part, {}) if isinstance(part, str) else _part(number, part)
        if message["role"] == "system" and text.startswith(BILLING):
            text = text.partition("\n")[2]
            if not text:
                continue
        yield text, further


def _part(number: int, part: Any) -> tuple[str, Mapping[str, Any]]:
    if part is IMAGE_PART:
        return "", IMAGE_PART
    if not isinstance(part, Mapping):
        raise PromptError(f"message {number} has the part {quote(part)}; give text, or a part of type 'text'")
    kind, given = part.get("type"), {str(name): value for name, value in part.items() if value is not None}
    media = next((name for name in (str(kind), *given) if MEDIA.search(name)), None)
    if media is not None:
        what = f"a part of type {quote(media)}"
        raise PromptError(
            f"message {number} has {what}, and Seer rolls out text, and images of prompts; leave it out"
        )
    field = TEXT_FIELDS.get(kind) if isinstance(kind, str) else None
    if field is None:
        what = f"a part of type {quote(kind)}"
        raise PromptError(f"message {number} has {what}, which Seer cannot read; give it the type 'text'")
    if not isinstance(part.get(field), str):
        raise PromptError(f"message {number} has a part without {field!r}; give it text, or leave it out")
    return part[field], {name: value for name, value in given.items() if name not in OF_PARTS}


def _of_assistant(number: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """Return calls and reasoning of an assistant's message."""
    found: dict[str, Any] = {}
    calls = message.get("tool_calls")
    if isinstance(calls, str | bytes | Mapping) or not isinstance(calls, Sequence | None):
        raise PromptError(f"message {number} has tool_calls that are no list; give a list of calls")
    if calls:
        found["tool_calls"] = [_call(number, each) for each in calls]
    reasoning = message.get("reasoning")
    if reasoning is None:
        reasoning = message.get("reasoning_content")
    if not isinstance(reasoning, str | None):
        raise PromptError(f"message {number} has reasoning that is no text; give text, or leave it out")
    if reasoning is not None:
        found |= {"reasoning": reasoning, "reasoning_content": reasoning}
    return found


def _call(number: int, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or call.get("type", "function") != "function":
        raise PromptError(
            f"message {number} has a call that is none of a function; give its type and function"
        )
    if not isinstance(function.get("name"), str):
        raise PromptError(f"message {number} has a call without the name of a function; give one")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = {}
    arguments = dict(arguments) if isinstance(arguments, Mapping) else {}
    return {**call, "function": {**function, "arguments": arguments}}


def _has_developer(template_source: str) -> bool:
    return '"developer"' in template_source or "'developer'" in template_source


def _as_system(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] != "developer":
        return message
    return {name: value for name, value in message.items() if name != "tools"} | {"role": "system"}


def _with_one_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with those of the system as one, at the beginning, where there are others."""
    places = [number for number, each in enumerate(messages) if each["role"] == "system"]
    if places == [0]:
        return messages
    texts = ["\n".join(text for text, _ in _parts(number, messages[number])) for number in places]
    merged = {"role": "system", "content": "\n\n".join(text for text in texts if text)}
    return [merged, *(each for each in messages if each["role"] != "system")]


@lru_cache(maxsize=32)
def content_format(template_source: str) -> ContentFormat:
    """Return whether a template goes over the parts of a content, by the rules of vLLM's detection.

    A template that is broken reads text.
    """
    environment = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
    try:
        return "openai" if _reads_parts(environment.parse(GENERATION.sub("", template_source))) else "string"
    except Exception:  # of the template's syntax, or an assignment to more than one name
        return "string"


def _reads_parts(root: nodes.Template) -> bool:
    """Return whether a loop goes over the content of a message, or over a macro's argument that is one."""
    chats = ["messages"]
    for chat in chats:
        chats += [
            name
            for each in root.find_all(nodes.Assign)
            if _reads(each.node, chat) and (name := _name(each.target)) not in chats
        ]
    loops = list(root.find_all(nodes.For))
    messages = [_name(each.target) for each in loops if any(_reads(each.iter, chat) for chat in chats)]
    macros = list(root.find_all(nodes.Macro))
    outside = {id(each) for each in loops}
    within: set[int] = set()
    for macro in macros:
        names = set(_contents(root, macro, messages))
        for loop in macro.find_all(nodes.For):
            outside.discard(id(loop))
            if isinstance(loop.iter, nodes.Name) and loop.iter.name in names:
                within.add(id(loop))
    for loop in loops:
        plain = isinstance(loop.iter, nodes.Name) and loop.iter.name == "content" and id(loop) in outside
        if plain or id(loop) in within or any(_reads(loop.iter, each, "content") for each in messages):
            _name(loop.target)
            return True
    return False


def _contents(root: nodes.Template, macro: nodes.Macro, messages: Sequence[str]) -> Iterator[str]:
    """Yield the macro's parameters that receive a message's content somewhere."""
    parameters = [each.name for each in macro.args]
    for call in root.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and call.node.name == macro.name:
            given = [
                *zip(parameters, call.args, strict=False),
                *((each.key, each.value) for each in call.kwargs),
            ]
            for name, value in given:
                if name in parameters and any(_reads(value, each, "content") for each in messages):
                    yield name


def _reads(node: nodes.Node | None, name: str, key: str | None = None) -> bool:
    """Return whether an expression is the variable ``name``, or its ``key``, filtered or sliced."""
    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    if key is not None:
        if isinstance(node, nodes.Getattr):
            named = node.attr == key
        else:
            named = (
                isinstance(node, nodes.Getitem)
                and isinstance(node.arg, nodes.Const)
                and node.arg.value == key
            )
        if not named:
            return False
        assert isinstance(node, nodes.Getattr | nodes.Getitem)
        node = node.node
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name


def _name(target: nodes.Node) -> str:
    if not isinstance(target, nodes.Name):
        raise TypeError(f"{target} is no name")
    return target.name
