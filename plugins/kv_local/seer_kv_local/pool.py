"""The pool beside the runtime: it owns the memory, which has no name and so leaves nothing behind."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from contextlib import suppress

from seer_core.errors import PluginError
from seer_core.kv import PoolStats, StoreSpec
from seer_kv_local.area import PAGE, Header, Word
from seer_kv_local.machine import available_bytes

__all__ = ["LocalPool"]

STORE = "seer_kv_local.store:LocalStore"


class LocalPool:
    """A ``KVPool`` of one anonymous memory file per instance.

    Instances open the files by this process's ``/proc/<pid>/fd``.  The kernel frees them with the last
    process that holds them, whatever kills it; while this one lives they outlast any instance.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._files: dict[str, tuple[int, mmap.mmap]] = {}
        self._last = PoolStats(capacity_bytes)

    async def start(self, instances: Sequence[str]) -> None:
        """Make an empty memory file for each instance; its pages are taken as they are written.

        Raises:
            PluginError: the machine has not that much memory, or cannot make such files.
        """
        await self.stop()
        if not hasattr(os, "memfd_create"):
            raise PluginError('the KV pool "local" needs memfd_create, which Linux has: set kv_pool = "none"')
        available = available_bytes()
        if self.capacity_bytes > available:
            raise PluginError(
                f"[kv_pool.local].capacity_bytes is {self.capacity_bytes}, but only {available} bytes of"
                ' memory are available; lower it, or set kv_pool = "none"'
            )
        size = self.capacity_bytes // len(instances) // PAGE * PAGE
        for instance in instances:
            fd = os.memfd_create(f"seer-kv-{instance}", os.MFD_CLOEXEC)
            os.ftruncate(fd, max(size, PAGE))
            memory = mmap.mmap(fd, 0)
            self._files[instance] = fd, memory
            Header(memory)[Word.EPOCH] = 1

    async def stop(self) -> None:
        """Give the memory back, once the last instance has let go of it too."""
        self._last = self.stats()
        while self._files:
            fd, _ = self._files.popitem()[1]
            os.close(fd)

    def store(self, instance_id: str) -> StoreSpec:
        """Return what an instance needs to find its own file and all others."""
        areas = {name: f"/proc/{os.getpid()}/fd/{fd}" for name, (fd, _) in self._files.items()}
        return StoreSpec(STORE, {"areas": areas, "capacity_bytes": self.capacity_bytes})

    async def clear(self) -> None:
        """Begin a new epoch, and give the memory of the last one back."""
        for _, memory in self._files.values():
            header = Header(memory)
            header[Word.EPOCH] += 1
            header[Word.USED] = 0
            if len(memory) > PAGE:
                with suppress(OSError):  # a kernel that will not: the slots are free all the same
                    memory.madvise(mmap.MADV_REMOVE, PAGE, len(memory) - PAGE)

    def stats(self) -> PoolStats:
        """Add up what the instances have counted."""
        if not self._files:
            return self._last
        headers = [Header(memory) for _, memory in self._files.values()]

        def total(word: Word) -> int:
            return sum(header[word] for header in headers)

        return PoolStats(
            capacity_bytes=self.capacity_bytes,
            used_bytes=total(Word.USED),
            asked_blocks=total(Word.ASKED),
            hit_blocks=total(Word.HIT),
            torn_blocks=total(Word.TORN),
            evicted_blocks=total(Word.EVICTED),
            put_bytes=total(Word.PUT_BYTES),
            got_bytes=total(Word.GOT_BYTES),
        )
