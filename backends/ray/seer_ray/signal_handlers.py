"""Keeps a signal's handler where C++ replaces it, which Python does not notice."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["kept_handler"]

SIGACTION_BYTES = 256
"""More than a ``struct sigaction`` has anywhere."""


@contextmanager
def kept_handler(number: int) -> Iterator[None]:
    """Restore a signal's handler at the end of the block, from any thread.

    Raises:
        OSError: there is no such signal.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    before = ctypes.create_string_buffer(SIGACTION_BYTES)
    if libc.sigaction(number, None, before):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    try:
        yield
    finally:
        libc.sigaction(number, before, None)
