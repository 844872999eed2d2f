"""The KV store a pool names: made once, and left alone once it has failed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import attrs
import numpy as np
import structlog

from seer_core.errors import ignore_report
from seer_core.ports.contracts import implemented
from seer_core.ports.kv import Bytes, KVStore
from seer_worker.process.loader import ImportedClass

__all__ = ["STORE", "FailsafeStore", "PrefetchedBlocks"]

log = structlog.get_logger("seer")

T = TypeVar("T")

STORE: ImportedClass[KVStore] = ImportedClass(
    "KV store", KVStore, 'correct what [seer].kv_pool names, or set it to "none"'
)


NOTHING: Bytes = np.empty((0, 0), np.uint8)


@attrs.frozen
class PrefetchedBlocks:
    """Blocks copied out of the store for a request, which its blocks from number ``first`` on will hold."""

    first: int
    blocks: Bytes


class FailsafeStore:
    """A store, as long as it works; without it everything is a miss."""

    def __init__(self, store: KVStore | None, report: Callable[[str], None] = ignore_report) -> None:
        self._store, self._report = store, report

    def ask(self, work: Callable[[KVStore], T], otherwise: T) -> T:
        """Do something with the store; if that raises, give the store up and report it."""
        if self._store is None:
            return otherwise
        try:
            return work(self._store)
        except Exception as error:
            log.exception("kv_store_failed")
            self._store = None
            self._report(f"the KV store failed: {type(error).__name__}: {error}")
            return otherwise

    def fetch(self, keys: Sequence[bytes], block_bytes: int) -> Bytes:
        """Copy out the blocks that the store has of the first keys, uint8 [blocks, block_bytes]."""

        def fetch(store: KVStore) -> Bytes:
            found = store.find(keys)
            if not found:
                return NOTHING
            blocks = np.empty((found, block_bytes), np.uint8)
            return blocks[: store.get(keys[:found], blocks)]

        return self.ask(fetch, NOTHING)

    def receive(self, message: Mapping[str, int]) -> None:
        """Pass the pool's note to the store."""
        self.ask(lambda store: store.receive(message) if implemented(store, "receive") else None, None)

    def take_message(self) -> dict[str, int]:
        """Return the store's note to the pool."""
        return self.ask(
            lambda store: dict(store.take_message()) if implemented(store, "take_message") else {}, {}
        )
