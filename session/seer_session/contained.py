"""Coroutines of other people's code that end no event loop.

A task that raises ``KeyboardInterrupt`` or ``SystemExit`` ends its event loop at once, and with it everything
that runs there, although what awaits the task would get the error anyway.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from contextvars import ContextVar
from typing import Any, TypeVar

from seer_core.error_origin import EscapedError, is_ctrl_c

__all__ = ["Contained", "contain_tasks"]

T = TypeVar("T")

_containing: ContextVar[bool] = ContextVar("containing", default=False)
"""Whether tasks that are made here are contained."""


class Contained(Coroutine[Any, Any, T]):
    """A coroutine that raises the error that ``replace`` returns in place of one that ends an event loop."""

    def __init__(
        self, work: Coroutine[Any, Any, T], replace: Callable[[BaseException], BaseException]
    ) -> None:
        self._work = work
        self._replace = replace

    def __await__(self) -> Generator[Any, Any, T]:
        return self._work.__await__()

    def send(self, value: Any) -> Any:
        """Go on."""
        return self._contain(self._work.send, value)

    def throw(self, *error: Any) -> Any:
        """Go on with an error."""
        return self._contain(self._work.throw, *error)

    def close(self) -> None:
        """Give up."""
        self._work.close()

    def _contain(self, go_on: Callable[..., Any], *given: Any) -> Any:
        try:
            return go_on(*given)
        except (KeyboardInterrupt, SystemExit) as error:
            if is_ctrl_c(error):
                raise
            raise self._replace(error) from error


def contain_tasks() -> None:
    """Let tasks that the running one makes from now on, and those that they make, end no event loop.

    Where they are awaited they raise an ``EscapedError``, which has the true one as its cause.
    """
    loop = asyncio.get_running_loop()
    before = loop.get_task_factory()
    if not isinstance(before, _Factory):
        loop.set_task_factory(_Factory(before))
    _containing.set(True)


class _Factory:
    """Makes tasks as the event loop did before, and contained ones where that is asked for."""

    def __init__(self, before: Callable[..., Any] | None) -> None:
        self._before = before

    def __call__(self, loop: asyncio.AbstractEventLoop, work: Any, **given: Any) -> asyncio.Task[Any]:
        if _containing.get():
            work = Contained(work, EscapedError)
        made: asyncio.Task[Any] = (
            asyncio.Task(work, loop=loop, **given)
            if self._before is None
            else self._before(loop, work, **given)
        )
        return made
