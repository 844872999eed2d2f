"""Files of JSON, and of lines of JSON: every flaw is an error with place, fact and remedy."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from seer_core.errors import SeerError
from seer_core.json_files import UNREADABLE, describe_flaw
from seer_core.model.arrays import unpacked

__all__ = ["JsonFormat"]

T = TypeVar("T")


class JsonFormat(Generic[T]):
    """A kind of JSON file: what its value, or each of its lines, is checked to be, and where to get one.

    ``kind`` completes "FILE is ...": "no profile".  Everything wrong with a file raises ``error``, one
    sentence with the file, the line if it has lines, the fact and ``remedy``.
    """

    def __init__(self, into: Any, kind: str, remedy: str, error: type[SeerError]) -> None:
        self._decoder: msgspec.json.Decoder[T] = msgspec.json.Decoder(into, dec_hook=unpacked)
        self.kind = kind
        self.remedy = remedy
        self.error = error

    def read(self, path: str | os.PathLike[str]) -> T:
        """Return a file's value."""
        where = f"{os.fspath(path)} is"
        try:
            raw = Path(path).read_bytes()
        except (OSError, ValueError) as error:
            raise self._error(where, error) from error
        return self.decode(raw, where)

    def lines(self, path: str | os.PathLike[str]) -> Iterator[tuple[int, T]]:
        """Yield the number and the value of each line."""
        try:
            with Path(path).open("rb") as file:
                decode = self._decoder.decode
                for number, line in enumerate(file, 1):
                    try:
                        value = decode(line)
                    except UNREADABLE as error:
                        raise self._error(f"{os.fspath(path)}:{number}:", error, line) from error
                    yield number, value
        except (OSError, ValueError) as error:
            raise self.error(
                f"cannot read {os.fspath(path)}: {describe_flaw(error)}; {self.remedy}"
            ) from error

    def decode(self, raw: bytes, where: str) -> T:
        """Return the value of what has been read already; ``where`` begins the sentence if it is none."""
        try:
            return self._decoder.decode(raw)
        except UNREADABLE as error:
            raise self._error(where, error, raw) from error

    def _error(self, where: str, error: Exception, raw: bytes = b"") -> SeerError:
        return self.error(f"{where} {self.kind}: {describe_flaw(error, raw)}; {self.remedy}")
