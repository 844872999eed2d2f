"""Errors that name the culprit, the fact and the remedy; the CLI prints them without a traceback."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = [
    "SHOWN",
    "ConfigError",
    "EngineError",
    "InputError",
    "NoPlaceError",
    "OtherWeightsError",
    "OutputError",
    "OverloadError",
    "PluginError",
    "PromptError",
    "SeerError",
    "StalledError",
    "TransitionError",
    "WeightVersionError",
    "forget_interrupts",
    "ignore_report",
    "name_of",
    "printable",
    "quote",
    "text_by",
]

QUOTED = 100
"""Characters of a value that a message shows."""

SHOWN = 300
"""Characters of a reason that a message shows; libraries put whole keys into theirs."""

LONGEST_NAME = 100
"""Characters of a class's name that a message repeats."""

PLAIN_KINDS = (int, list, tuple, dict, set, frozenset)

_written_name = type.__dict__["__name__"].__get__


class SeerError(Exception):
    """The base of all errors that a user can mend; ``str(error)`` is one complete sentence or more.

    Remedy: the message names it; catch this class for any error of Seer's.
    """


class ConfigError(SeerError):
    """The configuration cannot be used as written.

    Remedy: change the key, the option or the file that the message names.
    """


class PluginError(SeerError):
    """A plug-in cannot be loaded, answers wrongly, or raised.

    Remedy: mend or reinstall the plug-in that the message names, or run without it: ``-p no:NAME``.
    """


class PromptError(SeerError):
    """A prompt cannot be rolled out.

    Remedy: change the line or the field that the message names; ``--skip-bad`` leaves such lines out.
    """


class EngineError(SeerError):
    """An engine did not start, or none is left to go on with.

    Remedy: look into the log that the message names, and ask the doctor; ``--resume`` goes on with a run.
    """


class NoPlaceError(EngineError):
    """An instance has no place yet, as on a cluster whose nodes are full; the others can begin without it.

    Remedy: none is needed, it joins when there is room; add a node to have it sooner.
    """


class OtherWeightsError(EngineError):
    """A server of another program serves other weights than that program has loaded into the others.

    Remedy: load them there, too; it is looked at again and again while another has them.
    """


class InputError(SeerError):
    """A file has other content than its name promises.

    Remedy: name the file that the message asks for.
    """


class OutputError(SeerError):
    """Results cannot be written.

    Remedy: free space, or name another place.
    """


class OverloadError(SeerError):
    """A rollout has as many unfinished requests as it takes at a time.

    Remedy: submit the groups again when responses have finished, or raise ``most_requests``.
    """


class StalledError(SeerError):
    """Requests wait, nothing runs, and no instance is accepted for any of them.

    Remedy: give the engine more KV, or shorten prompts, ``max_tokens`` or chunks; a placer of your own has to
    accept some instance for each request that fits.
    """


class TransitionError(SeerError):
    """A request was asked for something that its state does not allow.

    Remedy: the engine or plug-in broke its contract; run the contract tests of
    ``seer-testing`` against it.
    """


class WeightVersionError(SeerError):
    """A rollout would mix responses of two weight versions.

    Remedy: update weights between rollouts, each time with a higher version, and ask for the version that is
    loaded.
    """


def quote(value: object, limit: int = QUOTED) -> str:
    """Return a value as messages show it: its ``repr``, made ``printable``."""
    return text_by(lambda each: _quoted(each, limit), value)


def _quoted(value: object, limit: int) -> str:
    if isinstance(value, str | bytes) and len(value) > limit:
        size = f"{len(value):,} {'characters' if isinstance(value, str) else 'bytes'}"
        return f"{value[:limit]!r}... ({size})"
    return printable(str.__str__(repr(value)), limit)


def text_by(write: Callable[[object], str], value: object) -> str:
    """Return what a value of others is written as, a plain string; where it cannot be, a clause that says so.

    The methods that give a value its text are code of others: they may raise, and return any string.
    """
    try:
        return str.__str__(write(value))
    except BaseException as error:
        forget_interrupts()
        kind, raised = name_of(type(value)), type(error)
        if type(value) in PLAIN_KINDS and raised in (ValueError, RecursionError):  # so many digits, or levels
            return f"a value of type {kind} that is too large to show"
        if issubclass(type(value), BaseException):
            return f"its text cannot be read, which raised {name_of(raised)}"
        return f"a value of type {kind} whose text cannot be read, which raised {name_of(raised)}"


def forget_interrupts() -> None:
    """Let the program end with its own exit status, after a caught ``KeyboardInterrupt`` of other code.

    Where ``exec`` or ``eval`` of a string ends in one, CPython sets a flag of the process, and a program that
    ends with this flag ends as by Ctrl-C.  The next string that is run clears it.  A real Ctrl-C that ends
    the program sets the flag after all this, and nothing clears it while the interpreter ends.
    """
    if threading.main_thread().is_alive():
        exec("")


def name_of(kind: type) -> str:
    """Return the name of a class of others for the middle of a sentence."""
    return printable(_written_name(kind), LONGEST_NAME)


def printable(text: str, limit: int | None = None, *, keep: str = "") -> str:
    """Return ``text`` on one line, with what a terminal would obey or hide written as escapes.

    The characters in ``keep`` stay as they are.  Beyond ``limit`` characters it is cut, and says how long it
    was.
    """
    if limit is not None and len(text) > limit:
        text = f"{text[:limit]}... ({len(text):,} characters)"
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() or each in keep else each.encode("unicode_escape").decode()
        for each in text
    )


def ignore_report(reason: str) -> None:
    """Drop a report of a plug-in's half in an engine; the default where a run does not collect them."""
