"""Whose fault it is: what an error of somebody's code says and where it was raised, on one line."""

from __future__ import annotations

from traceback import walk_tb

from seer_core.errors import printable

__all__ = ["fault", "one_line"]

LONGEST = 1000
"""Characters of a stranger's text that a message of ours repeats."""


def one_line(text: object) -> str:
    """Return a text without line breaks, for the middle of a sentence."""
    return printable(" ".join(str(text).split()), LONGEST)


def fault(error: BaseException, code: object) -> str:
    """Return an error's type, its text, and the file and line of the deepest frame in its author's code.

    ``code`` is the author's: a module's name, or an object of a class of his.  Where no frame is his, as when
    a call does not fit a method of his, the place is that of the deepest frame at all.
    """
    text = one_line(error)
    said = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return f"{said} at {place}" if (place := _place(error, code)) else said


def _place(error: BaseException, code: object) -> str:
    if isinstance(error, SyntaxError) and error.filename:
        return ""  # its text says where, and it has no frame of the author's
    module = code if isinstance(code, str) else code.__class__.__module__
    package = module.partition(".")[0]
    frames = [
        (f"{frame.f_code.co_filename}:{line}", str(frame.f_globals.get("__name__", "")).partition(".")[0])
        for frame, line in walk_tb(error.__traceback__)
    ]
    theirs = [place for place, owner in frames if owner == package]
    return theirs[-1] if theirs else frames[-1][0] if frames else ""
