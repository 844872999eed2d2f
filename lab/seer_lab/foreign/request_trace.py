"""Traces of requests as Mooncake published them and ``vllm bench serve --dataset-name timed_trace`` reads.

A line has ``timestamp``, ``input_length``, ``output_length`` and ``hash_ids``, the blocks of the prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from seer_lab.foreign.responses import LoggedResponse, keys_of, read_lines
from seer_lab.lengths import LONGEST, Tokens

__all__ = ["KIND", "recognises", "responses"]

KIND = "a trace of requests"


class _RequestLine(msgspec.Struct, frozen=True):
    """A request; equal blocks and an equal length are an equal prompt."""

    input_length: Tokens
    output_length: Annotated[int, Meta(ge=0, le=LONGEST)]
    hash_ids: tuple[int | str, ...] | None = None


def recognises(head: bytes) -> bool:
    """Return whether a file that begins with this line is such a trace."""
    return keys_of(head).issuperset(("input_length", "output_length"))


def responses(path: Path, count: Callable[[str], int]) -> Iterator[LoggedResponse]:
    """Yield the responses of a file, which has no texts to ``count``.

    Raises:
        InputError: see ``read_lines``.
    """
    for number, line in enumerate(read_lines(path, _RequestLine, KIND)):
        prompt = (line.input_length, line.hash_ids) if line.hash_ids else number
        yield LoggedResponse(0, prompt, line.input_length, line.output_length, line.output_length > 0)
