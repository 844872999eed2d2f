"""Where an error of a plug-in comes from: its text and the line that raised it, in one line."""

from __future__ import annotations

from traceback import walk_tb

from seer_core.errors import printable

__all__ = ["describe_error", "one_line", "place_of"]

LONGEST = 1000
"""Characters of a plug-in's text that a message repeats."""


def one_line(text: object) -> str:
    """Return a text without line breaks, for the middle of a sentence."""
    return printable(" ".join(str(text).split()), LONGEST)


def describe_error(error: BaseException, code: object) -> str:
    """Return an error's type, its text and its place in the code of its author; see ``place_of``."""
    text = one_line(error)
    described = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return f"{described} at {place}" if (place := place_of(error, code)) else described


def place_of(error: BaseException, code: object) -> str:
    """Return the file and line of the deepest frame of an error in its author's code; empty without a frame.

    ``code`` is the author's: a module's name, or an object of a class of that package.  Where no frame is in
    it, as when a call does not fit a method, the place is that of the deepest frame at all.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return ""  # its text has the place, and no frame is the author's
    module = code if isinstance(code, str) else str(getattr(code, "__module__", ""))
    package = module.partition(".")[0]
    frames = [
        (f"{frame.f_code.co_filename}:{line}", str(frame.f_globals.get("__name__", "")).partition(".")[0])
        for frame, line in walk_tb(error.__traceback__)
    ]
    theirs = [place for place, owner in frames if owner == package]
    return theirs[-1] if theirs else frames[-1][0] if frames else ""
