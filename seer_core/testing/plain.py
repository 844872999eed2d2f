"""What a worker process is given: plain data, and import paths."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import msgspec

__all__ = ["as_sent", "load"]


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
