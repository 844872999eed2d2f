"""Responses as other systems log them, one by one, and the groups that they make."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from seer_host.json_files import UNREADABLE, describe_flaw

from seer_core.errors import InputError
from seer_lab.lengths import GroupLengths, RecordedTurn

__all__ = ["LoggedResponse", "group_responses", "keys_of", "read_lines"]

T = TypeVar("T")


class LoggedResponse(msgspec.Struct, frozen=True):
    """One response; those with an equal ``group`` in an iteration answer one prompt."""

    iteration: int
    group: Hashable
    prompt_tokens: int
    output_tokens: int
    is_finished: bool = True
    """Whether its length is known: it was not aborted.  Nothing else of one that was is to be read."""
    turns: tuple[RecordedTurn, ...] = ()
    """What the model wrote and what tools answered, if the format says so; ``output_tokens`` is the sum."""

    @property
    def tool_tokens(self) -> int:
        """How many of its tokens are of tools."""
        return sum(turn.answer_tokens for turn in self.turns)


def group_responses(responses: Iterable[LoggedResponse]) -> list[list[GroupLengths]]:
    """Return the groups of each iteration, in the order of their first responses.

    The longest response counts as the limit of all.  Groups have turns where a tool answered in any response.
    """
    responses = list(responses)
    has_tools = any(each.tool_tokens for each in responses)
    iterations: dict[int, dict[Hashable, list[LoggedResponse]]] = {}
    limit = 1
    for each in responses:
        iterations.setdefault(each.iteration, {}).setdefault(each.group, []).append(each)
        limit = max(limit, each.output_tokens)
    return [
        [
            GroupLengths(
                str(number),
                max(each.prompt_tokens for each in group),
                tuple(each.output_tokens for each in group),
                limit,
                tuple(each.turns for each in group) if has_tools else (),
            )
            for number, group in enumerate(iterations[iteration].values())
        ]
        for iteration in sorted(iterations)
    ]


def keys_of(head: bytes) -> set[str]:
    """Return the keys of a line, or none if it is not a JSON object."""
    try:
        value = json.loads(head.decode("utf-8-sig"))  # of bytes, Python's own would guess the encoding
    except UNREADABLE:
        return set()
    return set(value) if isinstance(value, dict) else set()


def read_lines(path: Path, into: type[T], kind: str) -> Iterator[T]:
    """Yield the lines of a file as ``into``; ``kind`` completes "is not a line of ...".

    Python's own decoder reads NaN, which Python's own encoder writes.

    Raises:
        InputError: the file cannot be read, or a line is something else.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _line(line, into, f"{path}:{number} is not a line of {kind}")
    except OSError as error:
        raise InputError(f"cannot read {path}: {describe_flaw(error)}; mend its permissions") from error


def _line(line: bytes, into: type[T], flaw: str) -> T:
    try:
        value: Any = json.loads(line.decode("utf-8-sig"))
        return msgspec.convert(value, into)
    except UNREADABLE as error:
        cut = "" if line.endswith(b"\n") else "the file ends within it, "
        raise InputError(
            f"{flaw}: {cut}{describe_flaw(error, line)}; delete the line, or name another file"
        ) from error
