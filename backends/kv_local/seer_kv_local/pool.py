"""The pool beside the runtime: it owns memory and files, which have no name and so leave nothing behind."""

from __future__ import annotations

import asyncio
import os
import secrets
import tempfile
from collections.abc import Sequence
from pathlib import Path

from seer_host.machine_memory import available_bytes

from seer_core.errors import PluginError
from seer_core.ports.kv import PoolStats, StoreSpec
from seer_kv_local.slot_table import NONCE_BYTES, Word
from seer_kv_local.tiers import Tier, make_tier, path_of, reserve, share_of

__all__ = ["LocalPool"]

STORE = "seer_kv_local.store:LocalStore"


class LocalPool:
    """A ``KVPool`` of one anonymous memory file per instance, and of one without a name on disk if wanted.

    Instances open the files by this process's ``/proc/<pid>/fd``, and recognise them by a nonce.  The kernel
    frees them with the last process that holds them, even one killed; while this one lives they outlast any
    instance.
    """

    def __init__(self, capacity_bytes: int, disk_bytes: int = 0, disk_path: Path | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        self.disk_bytes = disk_bytes
        self.disk_path = disk_path or Path(tempfile.gettempdir())
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._memory: dict[str, Tier] = {}
        self._disk: dict[str, Tier] = {}
        self._last = PoolStats(capacity_bytes, disk_capacity_bytes=disk_bytes)

    async def start(self, instances: Sequence[str]) -> None:
        """Make empty files for each instance; memory is taken as it is written, room on disk at once.

        Raises:
            PluginError: the machine has not that much memory or room on disk, or cannot make such files.
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
        size = share_of(self.capacity_bytes, len(instances))
        disk_size = share_of(self.disk_bytes, len(instances))
        for instance in instances:
            self._memory[instance] = make_tier(f"seer-kv-{instance}", self._nonce, size)
        if self.disk_bytes:
            for instance in instances:
                disk_fd = await asyncio.to_thread(reserve, self.disk_path, disk_size)
                # The table may be of any size: pages that are never written take no memory.
                self._disk[instance] = make_tier(f"seer-kv-{instance}-disk", self._nonce, disk_size, disk_fd)

    async def stop(self) -> None:
        """Free memory and room on disk, once the last instance has closed them too."""
        self._last = self.stats()
        for tiers in (self._memory, self._disk):
            while tiers:
                tiers.popitem()[1].close()

    def store(self, instance_id: str) -> StoreSpec:
        """Return what an instance needs to find its own files and all others."""
        settings = {
            "tables": {name: path_of(tier.memory_fd) for name, tier in self._memory.items()},
            "disks": {
                name: (path_of(tier.memory_fd), path_of(tier.disk_fd))
                for name, tier in self._disk.items()
                if tier.disk_fd is not None
            },
            "nonce": self._nonce.hex(),
            "capacity_bytes": self.capacity_bytes,
            "disk_bytes": self.disk_bytes,
        }
        return StoreSpec(STORE, settings)

    async def clear(self) -> None:
        """Forget everything; the memory is given back, the room on disk stays reserved."""
        for tier in (*self._memory.values(), *self._disk.values()):
            tier.clear()

    def stats(self) -> PoolStats:
        """Add up what the instances have counted."""
        if not self._memory:
            return self._last

        def memory(word: Word) -> int:
            return sum(tier.header[word] for tier in self._memory.values())

        def disk(word: Word) -> int:
            return sum(tier.header[word] for tier in self._disk.values())

        return PoolStats(
            capacity_bytes=self.capacity_bytes,
            used_bytes=memory(Word.USED),
            asked_blocks=memory(Word.ASKED),
            hit_blocks=memory(Word.HIT),
            torn_blocks=memory(Word.TORN),
            evicted_blocks=memory(Word.EVICTED) + disk(Word.EVICTED),
            put_bytes=memory(Word.PUT_BYTES),
            got_bytes=memory(Word.GOT_BYTES),
            released_blocks=memory(Word.RELEASED) + disk(Word.RELEASED),
            disk_capacity_bytes=self.disk_bytes,
            disk_used_bytes=disk(Word.USED),
            disk_put_bytes=disk(Word.PUT_BYTES),
            disk_got_bytes=memory(Word.DISK_GOT_BYTES),
            disk_errors=memory(Word.ERRORS),
        )
