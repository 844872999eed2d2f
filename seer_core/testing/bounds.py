"""Waits that end."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["run_within"]

T = TypeVar("T")


def run_within(
    limit_s: float, wait: Coroutine[Any, Any, T], what: str, loop: asyncio.AbstractEventLoop | None = None
) -> T:
    """Run a coroutine and return its answer; an AssertionError names ``what`` if it takes longer.

    It runs on ``loop``, which stays open, or on one of its own.
    """

    async def bounded() -> T:
        try:
            return await asyncio.wait_for(wait, limit_s)
        except TimeoutError:
            raise AssertionError(f"{what} took more than {limit_s} s") from None

    return asyncio.run(bounded()) if loop is None else loop.run_until_complete(bounded())
