"""Reading files that other programs wrote: every flaw is an error with place, fact and remedy."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from seer_core.errors import SHOWN, SeerError, printable
from seer_core.model.arrays import unpacked

__all__ = [
    "UNREADABLE",
    "JsonFormat",
    "describe_flaw",
    "explain_error",
    "is_text",
    "lone_surrogate",
    "read_bytes",
]

T = TypeVar("T")

UNREADABLE = (ValueError, OverflowError, RecursionError)
"""What decoding raises where data is bad; ``msgspec``'s errors and ``UnicodeDecodeError`` are ValueErrors."""

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
LFS_POINTER = b"version https://git-lfs"
BEGINNINGS = {
    b"\x1f\x8b": "it is compressed, unpack it with `gunzip`",
    b"BZh": "it is compressed, unpack it with `bunzip2`",
    b"\xfd7zXZ": "it is compressed, unpack it with `unxz`",
    b"\x28\xb5\x2f\xfd": "it is compressed, unpack it with `unzstd`",
    b"PK\x03\x04": "it is a zip archive, unpack it with `unzip`",
    b"PAR1": "it is a file of Parquet",
    b"\x80": "it is a pickle of Python's",
    b"\xff\xfe": "it is text in UTF-16 or UTF-32, save it as UTF-8",
    b"\xfe\xff": "it is text in UTF-16, save it as UTF-8",
}
"""What files are that begin so, and are no text in UTF-8."""

ESCAPE = re.compile(
    rb"\\(?:u(d[89ab][0-9a-f]{2})(\\ud[c-f][0-9a-f]{2})?|(ud[c-f][0-9a-f]{2})|.)", re.IGNORECASE
)
"""In JSON: of half a pair of surrogates, of the other half behind it or alone, or of another character."""

NO_NUMBER = re.compile(rb"NaN|Infinity")
AT_BYTE = re.compile(r"\(byte (\d+)\)$")


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


def describe_flaw(error: BaseException, given: bytes | None = None) -> str:
    """Say in a clause what is wrong with ``given``, of which reading or decoding raised ``error``."""
    raw = given or b""
    if raw.startswith(BYTE_ORDER_MARK):
        return "it begins with a byte-order mark, save it as UTF-8 without one"
    if raw.startswith(LFS_POINTER):
        return "it is a git-lfs pointer and not the file itself, fetch that with `git lfs pull`"
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if type(error) is not ValueError and not isinstance(error, msgspec.ValidationError):
        for beginning, flaw in BEGINNINGS.items():
            if raw.startswith(beginning):
                return flaw
        if b"\0" in raw:
            return f"byte {raw.index(0)} is zero: it is damaged, or no text in UTF-8"
    if isinstance(error, UnicodeDecodeError):
        return _not_utf8(raw) or f"byte 0x{error.object[error.start]:02x} at {error.start} is not UTF-8"
    if isinstance(error, UnicodeEncodeError):
        letter = ascii(error.object[error.start])
        return f"a text in it has {letter}, half of a character"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, msgspec.ValidationError):
        key, fact = explain_error(error)
        return f"{key}: {fact}" if key else fact
    text = str(error)
    if isinstance(error, msgspec.DecodeError) and (flaw := _not_json(given, text)):
        return flaw
    if "integer string conversion" in text:
        return "an integer in it has thousands of digits"
    if isinstance(error, KeyError) or not text:
        text = f"{type(error).__name__} {text}".rstrip()
    return printable(text, SHOWN)


def lone_surrogate(raw: bytes) -> str:
    """Return the escape of half a pair of surrogates that JSON has alone, or nothing."""
    for found in ESCAPE.finditer(raw):
        if (found[1] and not found[2]) or found[3]:
            return found[0].decode()
    return ""


def _not_json(raw: bytes | None, text: str) -> str:
    """Say why ``raw`` is no JSON where the words of msgspec, ``text``, would mislead; otherwise nothing."""
    if raw is None:
        return "it ends within a value, or is empty" if "truncated" in text else ""
    if escape := lone_surrogate(raw):
        return f"{escape} is half of a character, write both halves"
    at = AT_BYTE.search(text)
    if at and (found := NO_NUMBER.match(raw, int(at[1]))):
        return f"{found[0].decode()} at byte {at[1]} is no number in JSON"
    if "truncated" not in text:
        return ""
    if raw.strip() in (b"{", b"["):
        return "its value has several lines, write each value in one, as `jq -c` does"
    return "it ends within a value" if raw.strip() else "it is empty"


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

    def _error(self, where: str, error: Exception, raw: bytes | None = None) -> SeerError:
        return self.error(f"{where} {self.kind}: {describe_flaw(error, raw)}; {self.remedy}")


def explain_error(error: msgspec.ValidationError) -> tuple[str, str]:
    """Return the key that a validation error is about, empty for the whole, and the fact."""
    fact, _, at = str(error).partition(" - at ")
    of_key, within, place = at.partition("key` in `")
    key = (place if within else of_key).strip("`").removeprefix("$").lstrip(".")
    fact = f"{fact[0].lower()}{fact[1:]}"
    return printable(key, SHOWN), printable(f"a key of it: {fact}" if within else fact, SHOWN)
