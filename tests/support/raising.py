"""Errors of every class, as code of users may raise them."""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import Callable
from typing import Any, NoReturn

import attrs

from seer_core.errors import PromptError

__all__ = ["ERRORS", "PLAIN", "STRANGE", "class_of", "raise_one"]

ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "BaseExceptionGroup": ("several", [KeyboardInterrupt("inner")]),
    "ExceptionGroup": ("several", [ValueError("inner")]),
    "UnicodeDecodeError": ("utf-8", b"\xff", 0, 1, "no character"),
    "UnicodeEncodeError": ("utf-8", "\ud800", 0, 1, "no character"),
    "UnicodeTranslateError": ("\ud800", 0, 1, "no character"),
}
"""What the builtin classes are made of that take no single text."""


class TextRaises(Exception):
    def __str__(self) -> str:
        raise KeyError("text")

    __repr__ = __str__


class TextInterrupts(Exception):
    def __str__(self) -> str:
        raise KeyboardInterrupt


class TextIsNone(Exception):
    def __str__(self) -> Any:
        return None


class OddText(str):
    def split(self, *arguments: Any) -> Any:
        raise SystemExit(3)

    isprintable = __len__ = __getitem__ = split


class TextIsOdd(Exception):
    def __str__(self) -> str:
        return OddText("odd")


class InitRaises(Exception):
    def __init__(self) -> None:
        raise ZeroDivisionError("init")


class ClassRaises(Exception):
    @property
    def __class__(self) -> Any:
        raise KeyError("class")


class AttributesRaise(Exception):
    def __getattribute__(self, name: str) -> Any:
        raise KeyboardInterrupt(name)


class Named(type):
    @property
    def __name__(cls) -> Any:
        raise KeyError("name")


class NameRaises(Exception, metaclass=Named):
    pass


@attrs.frozen
class Frozen(Exception):
    reason: str


class OwnInterrupt(KeyboardInterrupt):
    pass


class OwnEnd(StopIteration):
    pass


class OwnExit(SystemExit):
    pass


class BareBase(BaseException):
    pass


class Textless(PromptError):
    def __str__(self) -> str:
        raise KeyError("text")


def _nested(depth: int) -> BaseException:
    error: Exception = ValueError("innermost")
    for _ in range(depth):
        error = ExceptionGroup("outer", [error])
    return error


def _recursion() -> NoReturn:
    _recursion()


def _builtin(name: str) -> BaseException:
    error: BaseException = getattr(builtins, name)(*ARGUMENTS.get(name, ("no luck",)))
    return error


PLAIN: dict[str, Callable[[], BaseException]] = {
    name: lambda name=name: _builtin(name)  # type: ignore[misc]
    for name, kind in sorted(vars(builtins).items())
    if isinstance(kind, type)
    and issubclass(kind, BaseException)
    and name not in ("IOError", "EnvironmentError")
}
"""Those of Python, by name."""

STRANGE: dict[str, Callable[[], BaseException]] = {
    "CancelledError": lambda: asyncio.CancelledError("Cancelled by cancel scope 7f"),
    "InvalidStateError": lambda: asyncio.InvalidStateError("no"),
    "text raises": TextRaises,
    "text interrupts": TextInterrupts,
    "text is None": TextIsNone,
    "text is odd": TextIsOdd,
    "init raises": InitRaises,
    "class raises": ClassRaises,
    "attributes raise": AttributesRaise,
    "name raises": NameRaises,
    "name is odd": type("Bad\x1b[2J\n" + "k" * 3000, (Exception,), {}),
    "frozen": lambda: Frozen("cold"),
    "an interrupt of its own": OwnInterrupt,
    "an end of its own": OwnEnd,
    "an exit of its own": OwnExit,
    "a base of its own": BareBase,
    "an error of Seer's without a text": Textless,
    "an error of Seer's with an empty text": lambda: PromptError(""),
    "a surrogate": lambda: ValueError("wrong \ud835 answer"),
    "megabytes": lambda: ValueError("x" * 5_000_000),
    "lines": lambda: ValueError("a\n" * 1_000_000),
    "NULs": lambda: KeyboardInterrupt("\0" * 100_000),
    "nested groups": lambda: _nested(50),
    "arguments": lambda: ValueError(object(), ["\ud800"], {1: b"\xff"}),
}
"""Those of libraries, and of users that have no luck with them."""

ERRORS = PLAIN | STRANGE


def raise_one(name: str) -> NoReturn:
    """Raise the error of this name."""
    if name == "RecursionError":
        _recursion()
    raise ERRORS[name]()


def class_of(name: str) -> str:
    """Return the name of its class, as a message shows its beginning."""
    try:
        raise_one(name)
    except BaseException as error:
        kind: str = type.__dict__["__name__"].__get__(type(error))
        return kind.partition("\x1b")[0]
