"""Standard error that outlives its reader: a pipe that closes ends what is shown, and not the command."""

from __future__ import annotations

import os
import sys
from typing import Any, TextIO, cast

__all__ = ["outlive_reader"]


def outlive_reader() -> None:
    """Let standard error drop what nothing reads any more."""
    if sys.stderr is not None:  # it is where a program was started without one
        sys.stderr = cast("TextIO", _StandardError(sys.stderr))


class _StandardError:
    """A stream whose descriptor goes to the null device once writing to its pipe has failed."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            self._drop()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except BrokenPipeError:
            self._drop()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _drop(self) -> None:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self._stream.fileno())
        os.close(null)
