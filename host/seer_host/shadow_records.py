"""The record of requests that another scheduler has placed: a line each, which ``seer shadow`` reads."""

from __future__ import annotations

from pathlib import Path

import msgspec

__all__ = ["WatchedRequest", "append_watched"]


class WatchedRequest(msgspec.Struct, frozen=True):
    """A request as it was seen from outside: a line of a record."""

    step: int
    group: str
    server: str
    prompt_tokens: int
    tokens: int
    began_s: float
    """On any clock that all lines of a record have in common."""
    ended_s: float


def append_watched(file: Path, request: WatchedRequest) -> None:
    """Write a request behind those that a record has."""
    with file.open("ab") as lines:
        lines.write(msgspec.json.encode(request) + b"\n")
