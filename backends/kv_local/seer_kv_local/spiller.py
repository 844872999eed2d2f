"""Blocks on their way to disk, in a thread: writing one may take as long as a step of the engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import numpy as np

from seer_kv_local.slot_table import Bytes
from seer_kv_local.writer import SlotWriter

__all__ = ["Spiller"]

CLOSE_TIMEOUT_S = 5.0

Batch = tuple[int, list[bytes], Bytes, list[int]]


class Spiller:
    """The only thread that writes to ``table``; ``limit_blocks`` may wait for it, more are refused."""

    def __init__(self, table: SlotWriter, limit_blocks: int) -> None:
        self._table = table
        self._limit = limit_blocks
        self._waiting = 0
        self._changed = threading.Condition()
        self._queue: SimpleQueue[Batch | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="seer-kv-spiller", daemon=True)
        self._thread.start()

    def offer(
        self, epoch: int, keys: Sequence[bytes], blocks: Sequence[Bytes] | Bytes, sums: Sequence[int]
    ) -> int:
        """Take copies of blocks to be written, as many from the first on as there is room for."""
        with self._changed:
            taken = min(len(keys), self._limit - self._waiting)
            self._waiting += taken
        if taken:
            batch = epoch, list(keys[:taken]), np.stack(list(blocks[:taken])), list(sums[:taken])
            self._queue.put(batch)
        return taken

    def flush(self) -> None:
        """Wait until everything offered has been written."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting)

    def close(self, release: Callable[[], None]) -> None:
        """Write what waits, within a few seconds, and end the thread, which calls ``release`` at last."""
        self._release = release
        self._queue.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)

    def _work(self) -> None:
        while (batch := self._queue.get()) is not None:
            epoch, keys, blocks, sums = batch
            self._table.put(keys, blocks, sums, epoch)
            with self._changed:
                self._waiting -= len(keys)
                self._changed.notify_all()
        self._release()
