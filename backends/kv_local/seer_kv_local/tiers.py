"""Files without names, in memory and on disk: an instance's part of a tier, as its owner makes it."""

from __future__ import annotations

import mmap
import os
import tempfile
from contextlib import suppress
from pathlib import Path

import attrs

from seer_core.errors import PluginError
from seer_kv_local.slot_table import PAGE, SlotTableHeader, Word

__all__ = ["Tier", "make_tier", "path_of", "reserve", "share_of"]


@attrs.frozen(eq=False)
class Tier:
    """One instance's part of a tier: an anonymous memory file, and a file for blocks that are on disk."""

    memory_fd: int
    memory: mmap.mmap
    header: SlotTableHeader
    disk_fd: int | None = None

    def clear(self) -> None:
        """Begin a new epoch, and give the memory of the last one back."""
        self.begin(self.header[Word.EPOCH] + 1)

    def begin(self, epoch: int) -> None:
        """Begin this epoch, and give the memory of the last one back."""
        self.header[Word.EPOCH] = epoch
        self.header[Word.USED] = 0
        if len(self.memory) > PAGE:
            with suppress(OSError):  # a kernel that will not: the slots are free all the same
                self.memory.madvise(mmap.MADV_REMOVE, PAGE, len(self.memory) - PAGE)

    def close(self) -> None:
        """Close the files, which instances may still hold."""
        os.close(self.memory_fd)
        if self.disk_fd is not None:
            os.close(self.disk_fd)


def share_of(total_bytes: int, instances: int) -> int:
    """Return what each instance gets, in whole pages."""
    return max(PAGE, total_bytes // instances // PAGE * PAGE)


def reserve(directory: Path, size: int) -> int:
    """Open a file without a name, with all its room taken, so that it cannot run out of it later.

    Raises:
        PluginError: there is no such directory, or not that much room.
    """
    try:
        with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
            os.posix_fallocate(file.fileno(), 0, size)
            return os.dup(file.fileno())
    except OSError as error:
        raise PluginError(
            f"the KV pool cannot take {size} bytes per instance in [kv_pool.local].disk_path ="
            f" {str(directory)!r}: {error.strerror}; lower disk_bytes, or name another directory"
        ) from error


def make_tier(name: str, nonce: bytes, size: int, disk_fd: int | None = None) -> Tier:
    """Return an empty tier of that size: in memory, or the table of one whose blocks a file holds.

    Raises:
        PluginError: the system allows no such file.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    # memfd_create lets all users in; the kernel already keeps others from our descriptors
    os.fchmod(fd, 0o600)
    try:
        os.ftruncate(fd, size)
    except OSError as error:
        os.close(fd)
        if disk_fd is not None:
            os.close(disk_fd)
        raise PluginError(
            f"the KV pool cannot make a memory file of {size} bytes: {error.strerror}; raise this process's"
            " limit of file sizes (ulimit -f), or lower [kv_pool.local].capacity_bytes"
        ) from error
    memory = mmap.mmap(fd, 0 if disk_fd is None else PAGE)
    header = SlotTableHeader(memory)
    header.sign(nonce)
    header[Word.EPOCH] = 1
    return Tier(fd, memory, header, disk_fd)


def path_of(fd: int | None) -> str:
    """Return where other processes of this node open a file of this one."""
    return f"/proc/{os.getpid()}/fd/{fd}"
