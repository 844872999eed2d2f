"""Waits for other processes, threads and files: one patience for all, and an account of what kept it waiting.

A test waits for a condition, never for a time.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tests.support import patience
from tests.support.patience import PATIENCE_S
from tests.support.processes import descendants, describe
from tests.support.virtual_time import VirtualTime

__all__ = ["PATIENCE_S", "aeventually", "eventually"]

T = TypeVar("T")

PAUSE_S = 0.02
LAST_LINES = 40
"""Lines of each log that an account has."""


def eventually(condition: Callable[[], T], what: str = "", *, logs: Sequence[Path | str] = ()) -> T:
    """Return the first true value of a condition; raises AssertionError with an account if none comes.

    ``what`` names the condition in the account, and ``logs`` are the files whose last lines it has.
    """
    end = time.monotonic() + patience.PATIENCE_S
    while not (value := condition()):
        if time.monotonic() > end:
            raise AssertionError(_account(condition, what, value, logs))
        time.sleep(PAUSE_S)
    return value


async def aeventually(
    condition: Callable[[], Any], what: str = "", *, logs: Sequence[Path | str] = ()
) -> Any:
    """Do as ``eventually`` while the event loop runs; the condition may be a coroutine function.

    Virtual time stands still meanwhile: the condition is up to threads or other processes.
    """
    virtual = isinstance(asyncio.get_running_loop(), VirtualTime)
    end = time.monotonic() + patience.PATIENCE_S
    while True:
        value = condition()
        if inspect.isawaitable(value):
            value = await value
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(_account(condition, what, value, logs))
        if virtual:
            time.sleep(PAUSE_S)
        await asyncio.sleep(0 if virtual else PAUSE_S)


def _account(condition: Callable[[], Any], what: str, value: Any, logs: Sequence[Path | str]) -> str:
    parts = [
        f"it did not happen within {patience.PATIENCE_S:g} s: {what or _source_of(condition)}",
        f"the last value: {value!r:.2000}",
        *_threads(),
        *_tasks(),
        "the processes below this one:\n" + ("\n".join(map(describe, descendants())) or "none"),
        *(_tail(Path(log)) for log in logs),
    ]
    return "\n\n".join(parts)


def _source_of(condition: Callable[[], Any]) -> str:
    try:
        return inspect.getsource(condition).strip()
    except (OSError, TypeError):
        return repr(condition)


def _threads() -> Iterator[str]:
    names = {each.ident: each.name for each in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        stack = "".join(traceback.format_stack(frame)[-12:]).rstrip()
        yield f"the thread {names.get(ident, ident)}:\n{stack}"


def _tasks() -> Iterator[str]:
    """Yield the stacks of the tasks of all event loops that run, in whichever threads."""
    gc.unfreeze()  # what the harness has frozen is in no list
    loops = [each for each in gc.get_objects() if issubclass(type(each), asyncio.AbstractEventLoop)]
    for loop in loops:
        for task in asyncio.all_tasks(loop) if loop.is_running() else ():
            yield f"the task {task.get_name()}:\n{''.join(_frames(task.get_coro()))}".rstrip()


def _frames(coroutine: Any) -> Iterator[str]:
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None)
        if frame is not None:
            yield from traceback.format_list([traceback.extract_stack(frame, 1)[-1]])
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "gi_yieldfrom", None)


def _tail(log: Path) -> str:
    try:
        lines = log.read_text("utf-8", "replace").splitlines()[-LAST_LINES:]
    except OSError as error:
        lines = [str(error)]
    return f"the last lines of {log}:\n" + "\n".join(lines)
