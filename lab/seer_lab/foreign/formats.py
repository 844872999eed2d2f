"""The formats of other systems that are read, and how each is recognised."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from seer_lab.foreign import request_trace, slime_dump, verl_dump
from seer_lab.foreign.responses import LoggedResponse

__all__ = ["FORMATS", "Format"]


class Format(msgspec.Struct, frozen=True):
    """A format: ``recognises`` gets a file's first line, ``responses`` a file and what counts tokens.

    ``has_text`` says that lengths are to be counted.  ``note`` is a sentence about what is not read.
    """

    kind: str
    recognises: Callable[[bytes], bool]
    responses: Callable[[Path, Callable[[str], int]], Iterator[LoggedResponse]]
    has_text: bool = False
    note: str = ""


FORMATS = (
    Format(verl_dump.KIND, verl_dump.recognises, verl_dump.responses, has_text=True),
    Format(slime_dump.KIND, slime_dump.recognises, slime_dump.responses),
    Format(
        request_trace.KIND,
        request_trace.recognises,
        request_trace.responses,
        note="times of arrival are left out: all requests start at once",
    ),
)
