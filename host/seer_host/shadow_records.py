"""The record of requests that another scheduler has placed: a line each, which ``seer shadow`` reads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

__all__ = ["WatchedRequest", "append_watched"]


MOST_TOKENS = 10**9
MOST_S = 1e12

Tokens = Annotated[int, Meta(ge=0, le=MOST_TOKENS)]
Seconds = Annotated[float, Meta(ge=-MOST_S, le=MOST_S)]


class WatchedRequest(msgspec.Struct, frozen=True):
    """A request as it was seen from outside: a line of a record."""

    step: int
    group: str
    server: str
    prompt_tokens: Tokens
    tokens: Tokens
    began_s: Seconds
    """On any clock that all lines of a record have in common."""
    ended_s: Seconds


def append_watched(file: Path, request: WatchedRequest) -> None:
    """Write a request behind those that a record has."""
    with file.open("ab") as lines:
        lines.write(msgspec.json.encode(request) + b"\n")
