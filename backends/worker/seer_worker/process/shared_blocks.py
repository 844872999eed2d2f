"""Blocks of KV in memory that the processes of one instance share, each with a part of every block."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from seer_core.ports.kv import Bytes

__all__ = ["SharedBlocks"]


class SharedBlocks:
    """Blocks that other processes read and write in place; pickled for one, they are an array there.

    The memory has no name, and ends with the last process that holds it.  It must be unpickled while this
    object lives.
    """

    def __init__(self, count: int, block_bytes: int) -> None:
        """Take memory for ``count`` blocks, at least one, all zeros.

        Raises:
            OSError: there is not enough, or no descriptor is left.
        """
        descriptor = os.memfd_create("seer-kv-blocks", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, descriptor)
        os.fchmod(descriptor, 0o600)
        os.ftruncate(descriptor, count * block_bytes)
        self._descriptor = descriptor
        self.blocks = _mapped(descriptor, count, block_bytes)
        """uint8 [count, block_bytes]; it may outlive this object."""

    def __reduce__(self) -> tuple[Callable[[str, int, int], Bytes], tuple[Any, ...]]:
        return _opened, (f"/proc/{os.getpid()}/fd/{self._descriptor}", *self.blocks.shape)


def _opened(path: str, count: int, block_bytes: int) -> Bytes:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return _mapped(descriptor, count, block_bytes)
    finally:
        os.close(descriptor)


def _mapped(descriptor: int, count: int, block_bytes: int) -> Bytes:
    return np.frombuffer(mmap.mmap(descriptor, count * block_bytes), np.uint8).reshape(count, block_bytes)
