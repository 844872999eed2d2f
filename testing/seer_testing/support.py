"""Parts that contracts share: a wait with a limit, the seed of a run, data as another process receives it."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Coroutine
from importlib import import_module
from typing import Any, TypeVar

import msgspec
from seer_host.contract_checks import flaw_of

__all__ = ["VARIABLE", "as_sent", "expect_contract", "is_exploring", "load", "run_within", "seeded_random"]

VARIABLE = "SEER_CONTRACT_SEED"
"""The environment variable with the seed of a run that explores."""

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


def is_exploring() -> bool:
    """Return whether this run draws by a seed of its own."""
    return VARIABLE in os.environ


def seeded_random() -> random.Random:
    """Return the generator from which a contract draws its events."""
    return random.Random(os.environ.get(VARIABLE, 0))


def as_sent(settings: Any) -> Any:
    """Return settings as they arrive in another process; an AssertionError if they do not get there."""
    try:
        packed = msgspec.msgpack.encode(settings)
    except TypeError as error:
        raise AssertionError(f"{settings!r} is no plain data: {error}") from error
    sent = msgspec.msgpack.decode(packed)
    assert msgspec.msgpack.encode(sent) == packed
    return sent


def load(path: str) -> Any:
    """Import what ``package.module:Class`` names."""
    module, _, name = path.partition(":")
    assert name, f"{path!r} is no package.module:Class"
    return getattr(import_module(module), name)


def expect_contract(strategy: object, protocol: type) -> None:
    """Fail where ``seer run`` would refuse the strategy at start."""
    flaw = flaw_of(strategy, protocol)
    assert flaw is None, f"a {type(strategy).__name__} is no {protocol.__name__}: {flaw}"
