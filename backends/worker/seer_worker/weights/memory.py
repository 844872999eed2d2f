"""Memory that an instance asleep gives back.

On a GPU engines have a way of their own.  On a CPU they have none, but Linux helps: pages that are given up
(``MADV_DONTNEED``) are free at once, keep their address, and are zeros when they are next used.  So code that
holds a view of this memory may keep it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["release", "used_bytes"]

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def release(tensor: Tensor) -> None:
    """Give the whole pages of a tensor's storage back, which lies in main memory; they become zeros.

    Raises:
        OSError: the system does not take them.
    """
    storage = tensor.untyped_storage()
    page = mmap.PAGESIZE
    begin = -(-storage.data_ptr() // page) * page
    size = (storage.data_ptr() + storage.nbytes()) // page * page - begin
    if size > 0 and _libc.madvise(begin, size, mmap.MADV_DONTNEED) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def used_bytes(device: torch.device) -> int:
    """Return the memory in use: of this process in main memory, or of all processes on another device."""
    if device.type == "cpu":
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
    free, total = torch.cuda.mem_get_info(device)
    return total - free
