"""Long texts: how long they are at a glance, and where they go beyond what there is room for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from seer_core.ports.engine import Tokenizer

__all__ = ["LONG_TEXT", "characters_of", "cut", "end_beyond", "text_of"]

LONG_TEXT = 1 << 16
"""Characters from which texts are encoded beside the event loop, which would stand still meanwhile."""

SURE_CHARACTERS = 8
"""Characters for each of the tokens that there is room for, of which no language has so many on average."""

CUT_TOKENS = 64
"""Tokens that the cut end of a text may have more than the whole text has there."""


def characters_of(text: Any, messages: Any, variables: Any = None) -> int:
    """Return about how many characters a text, or messages with variables of their template, have."""
    found = len(text) if isinstance(text, str) else 0
    found += len(str(variables or ""))  # with tools
    for each in messages if isinstance(messages, list | tuple) else ():
        found += len(str(each.get("content", ""))) if isinstance(each, Mapping) else 0
    return found


def text_of(messages: Iterable[Mapping[str, Any]]) -> str:
    """Return the contents of messages that are text, or parts of text."""
    return "".join(text for message in messages for text in _texts(message.get("content")))


def cut(content: Any, characters: int) -> tuple[Any, int]:
    """Return the content of a message without the text beyond so many characters, and how many are left."""
    if isinstance(content, str):
        return content[:characters], characters - len(content[:characters])
    if not isinstance(content, list | tuple):
        return content, characters
    parts = []
    for part in content:
        short = part
        if isinstance(part, str):
            short, characters = cut(part, characters)
        elif isinstance(part, Mapping) and isinstance(part.get("text"), str):
            text, characters = cut(part["text"], characters)
            short = {**part, "text": text}
        parts.append(short)
    return parts, characters


def _texts(content: Any) -> Iterable[str]:
    for part in content if isinstance(content, list | tuple) else [content]:
        text = part.get("text") if isinstance(part, Mapping) else part
        if isinstance(text, str):
            yield text


def end_beyond(text: str, tokenizer: Tokenizer, most: int) -> int | None:
    """Return after how many characters a text surely has more than ``most`` tokens; None if it may have less.

    No more of the text is encoded.
    """
    size = SURE_CHARACTERS * max(1, most)
    while size < len(text):
        if len(tokenizer.encode(text[:size])) > most + CUT_TOKENS:
            return size
        size *= 4
    return None
