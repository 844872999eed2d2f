"""The fuzzer: inputs that are good are changed a little, and each must be taken or refused in one sentence.

A finding is any other error than Seer's own, a hang, or a message that no terminal should get: with control
characters, or thousands of characters long.  The same seed and number make the same input.
"""

from __future__ import annotations

import json
import random
import re
import signal
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import click

from seer_core.errors import SeerError

from .targets import CommandRefused, Target, Workspace

LONGEST_MESSAGE = 2000
MOST_LINES = 12
"""Prompts and lengths name ten bad lines at a time."""

HANG_S = 60.0

WORDS = (
    *(b"nan", b"inf", b"-inf", b"1e999", b"1e308", b"-1", b"0", b"-0.0", b"5e-324", b"1e30", b"0.5", b"true"),
    *(b"9223372036854775807", b"9223372036854775808", b"18446744073709551616", b"1000000000000", b"9" * 5000),
    *(b"null", b"{}", b"[]", b'""', b"''", b"[[]]", b"[{}]", b'{"a": 1}', b"[" * 3000, b'{"a":' * 3000),
    *(
        b"\xff",
        b"\xef\xbb\xbf",
        b"\x00",
        b"\x1b[31m",
        b'"\\ud800"',
        b'"\\u001b[2J"',
        b"\xe2\x80\xae",
        b"\n",
        b"\r",
    ),
    *(
        b'"' + b"k" * 5000 + b'"',
        b"x" * 5000,
        b"version https://git-lfs",
        b"=",
        b".",
        b",",
        b"0x" + b"f" * 5000,
    ),
    *(b"1979-05-27", b"no:", b"--", b"-", b"%s%n", b"{{", b"{%", b"none", b"sim", b"vllm", b"live", b"a=b"),
)
"""Odd pieces of TOML, JSON, numbers, UTF-8, terminal output and command lines."""

VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        0,
        -1,
        1,
        2**31,
        2**63,
        2**64,
        10**12,
        10**30,
        0.0,
        -0.5,
        1.5,
        1e300,
        5e-324,
        "",
        "x",
        "\x1b[2J",
    ),
    *([], [[]], [None], {}, {"a": {}}, "\u202e", "k" * 5000, ["x"] * 50, "NaN", [0], [-1], [[1, "2"]]),
)
"""Replacements for a value of JSON."""

TOKEN = re.compile(rb'"[^"\n]*"|[-+]?[0-9][0-9_.eE+-]*|[A-Za-z_][A-Za-z_0-9]*')


class HangError(BaseException):
    """An input took longer than ``HANG_S``."""


@attrs.define
class FuzzTally:
    """Counts of one target's inputs; findings by where they were raised."""

    taken: int = 0
    refused: int = 0
    findings: Counter[str] = attrs.Factory(Counter)

    @property
    def inputs(self) -> int:
        """How many were tried."""
        return self.taken + self.refused + self.findings.total()


def changed(good: bytes, others: list[bytes], chance: random.Random) -> bytes:
    """Return a good input with one to four changes."""
    data = good
    for _ in range(chance.choice((1, 1, 1, 2, 3, 4))):
        data = chance.choice((_bytes, _word, _word, _token, _token, _token, _value, _value, _spliced))(
            data, others, chance
        )
    return data


def _bytes(data: bytes, others: list[bytes], chance: random.Random) -> bytes:
    """Flip a bit, cut the end or a piece, or write a piece twice."""
    if not data:
        return chance.randbytes(8)
    start, length = chance.randrange(len(data)), chance.choice((1, 1, 4, 40))
    piece = data[start : start + length]
    match chance.randrange(5):
        case 0:
            return data[:start] + bytes([data[start] ^ 1 << chance.randrange(8)]) + data[start + 1 :]
        case 1:
            return data[:start]
        case 2:
            return data[:start] + data[start + length :]
        case 3:
            return data[:start] + piece * chance.choice((2, 3, 50)) + data[start + length :]
        case _:
            return data[:start] + chance.randbytes(length) + data[start:]


def _word(data: bytes, others: list[bytes], chance: random.Random) -> bytes:
    """Insert an odd word somewhere."""
    at = chance.choice((0, len(data), chance.randrange(len(data) + 1)))
    return data[:at] + chance.choice(WORDS) + data[at:]


def _token(data: bytes, others: list[bytes], chance: random.Random) -> bytes:
    """Replace a number, a string or a name by an odd word, or by another of the input's own."""
    found = list(TOKEN.finditer(data[:20_000]))
    if not found:
        return _bytes(data, others, chance)
    token = chance.choice(found)
    new = chance.choice(WORDS) if chance.random() < 0.7 else chance.choice(found).group()
    return data[: token.start()] + new + data[token.end() :]


def _spliced(data: bytes, others: list[bytes], chance: random.Random) -> bytes:
    """Continue with a part of another good input, or of the same one."""
    other = chance.choice(others)
    return data[: chance.randrange(len(data) + 1)] + other[chance.randrange(len(other) + 1) :]


def _value(data: bytes, others: list[bytes], chance: random.Random) -> bytes:
    """Replace a value of JSON, or remove it."""
    lines = data.split(b"\n")
    at = chance.randrange(len(lines))
    whole = len(lines) > 1 and data[:1] == b"{" and lines[0] == b"{"
    try:
        document = json.loads(data if whole else lines[at])
        places = list(_places(document))
        if not places:
            return _token(data, others, chance)
        holder, key = chance.choice(places)
        match chance.randrange(4):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, dict):
                holder[chance.choice(VALUES[15:18])] = holder[key]
            case _:
                holder[key] = chance.choice(VALUES)
        text = json.dumps(document).encode()
    except (ValueError, RecursionError):
        return _token(data, others, chance)
    return text if whole else b"\n".join([*lines[:at], text, *lines[at + 1 :]])


def _places(document: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every list or mapping in a document with each of its keys."""
    left = [document]
    while left:
        holder = left.pop()
        if isinstance(holder, dict | list):
            for key in list(holder) if isinstance(holder, dict) else range(len(holder)):
                yield holder, key
                left.append(holder[key])


def complaint(message: str) -> str | None:
    """Return what is wrong with an error's message, or None."""
    lines = message.rstrip("\n").split("\n")
    if any(not line.isprintable() for line in lines):
        return "control characters in a message"
    if len(lines) > MOST_LINES or max(map(len, lines)) > LONGEST_MESSAGE:
        return "a message of many lines or characters"
    return None if message.strip() else "an empty message"


def judge(target: Target, workspace: Workspace, data: bytes) -> tuple[bool, str, str]:
    """Try one input; return whether it was taken, the kind of finding if any, and its traceback."""
    try:
        with _bounded():
            target.attempt(workspace, data)
    except (SeerError, click.UsageError, CommandRefused, *target.refusals) as error:
        kind = complaint(str(error))
        return False, "" if kind is None else f"{kind}: {_place(error)}", repr(str(error))[:1000]
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        cause = error.__cause__ or error
        story = "".join(traceback.format_exception(error))
        return False, f"{type(cause).__name__} {_place(cause)}", story[-4000:]
    return True, "", ""


def _place(error: BaseException) -> str:
    """Return the innermost file and line outside of libraries."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "site-packages" not in frame.filename and "/lib/python" not in frame.filename
    ]
    frame = frames[-1] if frames else None
    return f"at {Path(frame.filename).name}:{frame.lineno}" if frame is not None else "in libraries alone"


@contextmanager
def _bounded() -> Iterator[None]:
    """Raise ``HangError`` after ``HANG_S`` seconds, and every warning as an error."""

    def hang(number: int, frame: Any) -> None:
        raise HangError(f"no end after {HANG_S:g} s")

    before = signal.signal(signal.SIGALRM, hang)
    signal.setitimer(signal.ITIMER_REAL, HANG_S)
    try:
        with warnings.catch_warnings(action="error"):
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def fuzz(
    target: Target,
    workspace: Workspace,
    seed: int,
    numbers: Iterable[int],
    found: Callable[[int, bytes, str, str], None],
) -> FuzzTally:
    """Try a target's inputs of these numbers.

    ``found`` is called with number, input, kind and story of the first finding of each kind.
    """
    tally = FuzzTally()
    good = target.good(workspace)
    for number in numbers:
        chance = random.Random(f"{seed} {target.name} {number}")
        # The first ones are as they are.
        data = good[number] if number < len(good) else changed(chance.choice(good), good, chance)
        taken, kind, story = judge(target, workspace, data)
        if kind:
            if kind not in tally.findings:
                found(number, data, kind, story)
            tally.findings[kind] += 1
        elif taken:
            tally.taken += 1
        else:
            tally.refused += 1
    return tally
