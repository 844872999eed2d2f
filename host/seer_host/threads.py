"""Blocking calls, kept off the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar, cast

__all__ = ["in_thread"]

T = TypeVar("T")


async def in_thread(
    limit_s: float | None, call: Callable[..., T], *arguments: Any, name: str = "seer-call"
) -> T:
    """Return what a blocking call returns, from a thread of its own, of this name.

    The thread is a daemon: a call that never returns, as of a cluster whose head is gone, keeps neither the
    event loop nor the end of the process waiting.  It may raise anything: that comes here, where Python wraps
    the end of an iteration in a RuntimeError.

    Raises:
        TimeoutError: it takes longer than ``limit_s``, if there is a limit.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[tuple[T | None, BaseException | None]] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if not done.done():
            done.set_result((result, error))  # as an exception, a future takes no StopIteration

    def run() -> None:
        result: T | None = None
        error: BaseException | None = None
        try:
            result = call(*arguments)
        except BaseException as raised:
            error = raised
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name=name, daemon=True).start()
    async with asyncio.timeout(limit_s):
        result, error = await done
    if error is not None:
        raise error
    return cast("T", result)
