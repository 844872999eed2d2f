"""One instance's end of the pool: it writes its own tables and reads those of all instances."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from seer_core.errors import EngineError
from seer_core.ports.kv import StoreContext
from seer_kv_local.slot_table import Bytes, FileBlocks, SlotTable, Word
from seer_kv_local.spiller import Spiller
from seer_kv_local.writer import SlotWriter

__all__ = ["LocalStore"]

WAITING_SHARE = 8
"""Blocks that wait for the disk take an eighth of the memory of those in the pool, on top of it."""


class LocalStore:
    """A ``KVStore``.

    ``settings["tables"]`` maps every instance to the path of its memory; ``settings["disks"]`` to the paths
    of its disk tier's table and blocks, and is empty without one; ``settings["nonce"]`` is in hex.
    """

    def __init__(self, settings: Mapping[str, Any], host: StoreContext) -> None:
        self._files: list[FileBlocks] = []
        self._report = host.report
        self._spiller: Spiller | None = None
        try:
            nonce = bytes.fromhex(settings["nonce"])
            self._open(dict(settings["tables"]), dict(settings["disks"]), nonce, host)
        except OSError as error:
            raise EngineError(
                f"the KV pool's memory cannot be opened: {error}; instances must run on the runtime's"
                ' machine, as its user and in its container: else set kv_pool = "none"'
            ) from error
        except ValueError as error:
            raise EngineError(
                f"the KV pool is too small: a block of {host.block_tokens} tokens takes {host.block_bytes}"
                f" bytes; raise [kv_pool.local].capacity_bytes above {settings['capacity_bytes']},"
                f" and disk_bytes above {settings['disk_bytes']} or set it to 0"
            ) from error
        self._errors_before = self._counts[Word.ERRORS]

    def _open(
        self, tables: dict[str, str], disks: dict[str, Sequence[str]], nonce: bytes, host: StoreContext
    ) -> None:
        size = host.block_bytes
        own = tables.pop(host.instance_id)
        self._own = SlotWriter(own, nonce, size, spill=self._spill if disks else None)
        self._counts = self._own.header
        others = (SlotTable(path, nonce, size) for path in tables.values())
        self._tables: list[SlotTable] = [self._own, *others]
        # A disk's file has no nonce: its table is of the same process, and comes first.
        self._disks = [
            SlotTable(table, nonce, size, self._file(path, size)) for table, path in disks.values()
        ]
        if disks:
            table, path = disks[host.instance_id]
            disk = SlotWriter(table, nonce, size, self._file(path, size))
            self._spiller = Spiller(disk, max(1, self._own.slots // WAITING_SHARE))

    def _file(self, path: str, block_bytes: int) -> FileBlocks:
        self._files.append(FileBlocks(path, block_bytes, self._report))
        return self._files[-1]

    def _spill(
        self, epoch: int, keys: Sequence[bytes], blocks: Sequence[Bytes] | Bytes, sums: Sequence[int]
    ) -> int:
        return 0 if self._spiller is None else self._spiller.offer(epoch, keys, blocks, sums)

    def find(self, keys: Sequence[bytes]) -> int:
        """Return how many of the keys, from the first on, are there."""
        self._refresh()
        found = 0
        for key in keys:
            if not self._holds(key):
                break
            found += 1
        self._counts.add(Word.ASKED, len(keys))
        self._counts.add(Word.HIT, found)
        return found

    def lacks(self, keys: Sequence[bytes]) -> list[int]:
        """Return the positions of those keys that are not there; the others count as used just now."""
        self._refresh()
        missing = [position for position, key in enumerate(keys) if not self._holds(key)]
        for table in (*self._tables, *self._disks):
            for key in reversed(keys):
                table.use(key)
        return missing

    def put(self, keys: Sequence[bytes], blocks: Bytes) -> None:
        """Keep copies in this instance's own table; on its disk what the memory is too small for."""
        self._own.put(keys, blocks)
        self._count_errors()

    def get(self, keys: Sequence[bytes], blocks: Bytes) -> int:
        """Copy blocks, each checked, up to the first miss."""
        self._refresh()
        copied = len(keys)
        for position, key in enumerate(keys):
            if not self._copy(key, blocks[position]):
                copied = position
                break
        self._counts.add(Word.GOT_BYTES, copied * self._own.block_bytes)
        self._count_errors()
        return copied

    def drop(self, keys: Sequence[bytes]) -> None:
        """Mark blocks, in any instance's table, as those to be evicted next."""
        self._refresh()
        for table in (*self._tables, *self._disks):
            for key in keys:
                table.drop(key)

    def close(self) -> None:
        """Close all memory and files; what was put stays for the others."""
        files = self._files

        def release() -> None:
            for file in files:
                file.close()

        if self._spiller is None:
            release()
        else:  # a disk may be slow, and another file would have the descriptor by then
            self._spiller.close(release)
        self._count_errors()
        self._tables, self._disks, self._files = [], [], []
        del self._own, self._counts, self._spiller

    def _refresh(self) -> None:
        for table in (*self._tables, *self._disks):
            table.refresh()

    def _holds(self, key: bytes) -> bool:
        return any(key in table for table in (*self._tables, *self._disks))

    def _copy(self, key: bytes, into: Bytes) -> bool:
        for table in (*self._tables, *self._disks):
            answer = table.copy(key, into)
            if answer:
                if table in self._disks:
                    self._counts.add(Word.DISK_GOT_BYTES, into.size)
                return True
            if answer is None:
                self._counts.add(Word.TORN, 1)
        return False

    def _count_errors(self) -> None:
        self._counts[Word.ERRORS] = self._errors_before + sum(file.errors for file in self._files)
