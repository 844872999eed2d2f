"""Reading files that other programs wrote: every flaw is an error with place, fact and remedy."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from seer_core.errors import SHOWN, SeerError, printable
from seer_core.model.arrays import unpacked

__all__ = ["UNREADABLE", "JsonFormat", "describe_flaw", "explain_error", "is_text", "read_bytes"]

T = TypeVar("T")

UNREADABLE = (ValueError, OverflowError, RecursionError)
"""What decoding raises where data is bad; ``msgspec``'s errors and ``UnicodeDecodeError`` are ValueErrors."""

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
LFS_POINTER = b"version https://git-lfs"


def read_bytes(path: str | os.PathLike[str], remedy: str, error: type[SeerError]) -> bytes:
    """Return what a file holds.

    Raises:
        SeerError: an ``error``, if it cannot be read.
    """
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as failure:
        raise error(f"cannot read {os.fspath(path)}: {describe_flaw(failure)}; {remedy}") from failure


def is_text(argument: str) -> bool:
    """Say whether an argument of the command line was UTF-8; Python keeps other bytes as lone surrogates."""
    return not any("\ud800" <= letter <= "\udfff" for letter in argument)


def describe_flaw(error: BaseException, raw: bytes = b"") -> str:
    """Say in a clause what is wrong with ``raw``, of which reading or decoding raised ``error``."""
    if raw.startswith(BYTE_ORDER_MARK):
        return "it begins with a byte-order mark, save it as UTF-8 without one"
    if raw.startswith(LFS_POINTER):
        return "it is a git-lfs pointer and not the file itself, fetch that with `git lfs pull`"
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if isinstance(error, UnicodeDecodeError):
        return _not_utf8(raw) or f"byte 0x{error.object[error.start]:02x} at {error.start} is not UTF-8"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, msgspec.ValidationError):
        key, fact = explain_error(error)
        return f"{key}: {fact}" if key else fact
    text = str(error)
    if "integer string conversion" in text:
        return "an integer in it has thousands of digits"
    return printable(text, SHOWN)


def _not_utf8(raw: bytes) -> str:
    """Say where ``raw`` is not UTF-8; msgspec counts from the start of a string."""
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        return f"byte 0x{raw[error.start]:02x} at {error.start} is not UTF-8"
    return ""


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


def explain_error(error: msgspec.ValidationError) -> tuple[str, str]:
    """Return the key that a validation error is about, empty for the whole, and the fact."""
    fact, _, at = str(error).partition(" - at ")
    key = at.strip("`").removeprefix("$").lstrip(".")
    return printable(key, SHOWN), printable(f"{fact[0].lower()}{fact[1:]}", SHOWN)
