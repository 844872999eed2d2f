"""Errors and values of other people's code: their text, and the line that raised them, in one safe line.

Any class may be raised, also one that means something to Python: ``KeyboardInterrupt``, ``SystemExit``,
``CancelledError``, ``GeneratorExit``, ``StopIteration``.  Callers of such code catch ``BaseException``, raise
an ``is_interruption`` on, and make a reason of the rest.  The methods that give an error or a value
its text are code of others, too: they may raise, and write what no terminal or file takes.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from traceback import walk_tb
from typing import cast

from seer_core.errors import SeerError, forget_interrupts, name_of, printable, quote, text_by

__all__ = [
    "EscapedError",
    "describe_error",
    "fact_of",
    "is_ctrl_c",
    "is_interruption",
    "is_sentence",
    "one_line",
    "place_of",
    "shown",
]

LONGEST = 1000
"""Characters of a plug-in's text that a message repeats."""

MOST_ITEMS = 1000
"""Items of a collection that is written out before it is cut."""

CONTAINERS = (list, tuple, dict, set, frozenset)

ENDS_OF_ITERATION = (StopIteration, StopAsyncIteration)


class EscapedError(BaseException):
    """Code raised its cause, an error that ends event loops, in a task that must not do that."""


def is_ctrl_c(error: BaseException) -> bool:
    """Return whether an error is Ctrl-C, or a signal like it, and not raised by the code that was called.

    Python raises it in the main thread alone.  An event loop that ``asyncio.run`` has started there takes
    Ctrl-C itself and cancels its main task, so code that it calls meets none.
    """
    if not issubclass(type(error), KeyboardInterrupt):
        return False
    if threading.current_thread() is not threading.main_thread():
        return False
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return True
    return signal.getsignal(signal.SIGINT) is signal.default_int_handler


def is_interruption(error: BaseException) -> bool:
    """Return whether an error ends what calls other code, and is no failure of that code.

    It is Ctrl-C, or the cancellation of the task that runs here.
    """
    if not issubclass(type(error), asyncio.CancelledError):
        return is_ctrl_c(error)
    try:
        task = asyncio.current_task()
    except RuntimeError:
        return False
    return task is not None and task.cancelling() > 0


def is_sentence(error: BaseException) -> bool:
    """Return whether an error is one of Seer's, with a text that can be printed, and so needs no other."""
    if not issubclass(type(error), SeerError):
        return False
    try:
        return bool(str.__str__(str(error)).strip().encode())
    except BaseException:
        return False


def one_line(text: object) -> str:
    """Return a text without line breaks, for the middle of a sentence."""
    return _line(text_by(str, text))


def shown(value: object) -> str:
    """Return a value of others as messages show it, in one line."""
    kind = type(value)
    if kind in CONTAINERS and (size := len(value)) > MOST_ITEMS:  # type: ignore[arg-type]
        return f"a {name_of(kind)} of {size:,} items"
    return _line(quote(value))


def fact_of(error: BaseException) -> str:
    """Return an error's type and the first line of its text, for libraries whose errors have many."""
    forget_interrupts()
    lines = text_by(str, error).strip().splitlines()
    return f"{name_of(type(error))}: {_line(lines[0])}" if lines else name_of(type(error))


def describe_error(error: BaseException, code: object) -> str:
    """Return an error's type, its text and its place in the code of its author; see ``place_of``.

    Of a group of errors, the first that is no group is described behind it.
    """
    forget_interrupts()
    try:
        return _described(error, code)
    except BaseException:  # its attributes may be code, too
        return f"{name_of(type(error))}, which cannot be described"


def place_of(error: BaseException, code: object) -> str:
    """Return the file and line of the deepest frame of an error in its author's code; empty without a frame.

    ``code`` is the author's: a module's name, or an object of a class of that package.  Where no frame is in
    it, as when a call does not fit a method, the place is that of the deepest frame at all.
    """
    if issubclass(type(error), SyntaxError) and cast("SyntaxError", error).filename:
        return ""  # its text has the place, and no frame is the author's
    module = code if isinstance(code, str) else str(getattr(code, "__module__", ""))
    package = module.partition(".")[0]
    frames = [
        (f"{frame.f_code.co_filename}:{line}", str(frame.f_globals.get("__name__", "")).partition(".")[0])
        for frame, line in walk_tb(error.__traceback__)
    ]
    theirs = [place for place, owner in frames if owner == package]
    return printable(theirs[-1] if theirs else frames[-1][0] if frames else "", LONGEST)


def _described(error: BaseException, code: object) -> str:
    error = _own(error)
    text = one_line(error)
    described = f"{name_of(type(error))}: {text}" if text else name_of(type(error))
    first = error
    while issubclass(type(first), BaseExceptionGroup):
        first = cast("BaseExceptionGroup[BaseException]", first).exceptions[0]
    if first is not error:
        return f"{described}, the first: {describe_error(first, code)}"
    return f"{described} at {place}" if (place := place_of(error, code)) else described


def _own(error: BaseException) -> BaseException:
    """Return what was raised at first, of an error that Python or the runtime has put in its place.

    No coroutine and no generator raises the end of an iteration.
    """
    cause = error.__cause__
    if type(error) is EscapedError and cause is not None:
        return cause
    if type(error) is RuntimeError and isinstance(cause, ENDS_OF_ITERATION):
        kind = StopIteration if isinstance(cause, StopIteration) else StopAsyncIteration
        if str(error).endswith(f"raised {kind.__name__}"):
            return cause
    return error


def _line(text: str) -> str:
    line = printable(" ".join((text if len(text) <= LONGEST else text[: LONGEST + 1]).split()))
    return line if len(line) <= LONGEST else f"{line[:LONGEST]}... ({len(text):,} characters)"
