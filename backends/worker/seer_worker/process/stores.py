"""The KV store a pool names: made once, called by one thread at a time, and left alone once it has failed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import methodcaller
from threading import RLock
from typing import TypeVar

import structlog

from seer_core.errors import ignore_report
from seer_core.ports.contracts import implemented
from seer_core.ports.kv import Bytes, KVStore
from seer_worker.process.loader import ImportedClass

__all__ = ["STORE", "FailsafeStore"]

log = structlog.get_logger("seer")

T = TypeVar("T")

STORE: ImportedClass[KVStore] = ImportedClass(
    "KV store", KVStore, 'correct what [seer].kv_pool names, or set it to "none"'
)


GET_BYTES = 32 << 20
"""So much is copied out at once, if a block is not larger; other threads wait no longer for the store."""


class FailsafeStore:
    """A store, as long as it works; without it everything is a miss.  Any thread may call it."""

    def __init__(self, store: KVStore | None, report: Callable[[str], None] = ignore_report) -> None:
        self._store, self._report = store, report
        self._unclosed = store
        self._lock = RLock()

    def ask(self, work: Callable[[KVStore], T], otherwise: T) -> T:
        """Do something with the store; if that raises, give the store up and report it."""
        with self._lock:
            if self._store is None:
                return otherwise
            try:
                return work(self._store)
            except Exception as error:
                log.exception("kv_store_failed")
                self._store = None
                self._report(f"the KV store failed: {type(error).__name__}: {error}")
                return otherwise

    def close(self) -> None:
        """Close the store, also one that has been given up, and be without; idempotent."""
        with self._lock:
            store, self._store, self._unclosed = self._unclosed, None, None
            try:
                if store is not None:
                    store.close()
            except Exception:
                log.exception("kv_store_not_closed")

    def find(self, keys: Sequence[bytes]) -> int:
        """Return how many of the keys, from the first on, the store has, to the best of its knowledge."""
        return self.ask(lambda store: store.find(keys), 0)

    def get(self, keys: Sequence[bytes], blocks: Bytes) -> int:
        """Copy the blocks of these keys into ``blocks``, up to the first miss; return how many."""
        at_once = max(1, GET_BYTES // blocks.shape[1])
        for begin in range(0, len(keys), at_once):
            part = keys[begin : begin + at_once]
            into = blocks[begin : begin + at_once]
            got = self.ask(methodcaller("get", part, into), 0)
            if got < len(part):
                return begin + got
        return len(keys)

    def receive(self, message: Mapping[str, int]) -> None:
        """Pass the pool's note to the store."""
        self.ask(lambda store: store.receive(message) if implemented(store, "receive") else None, None)

    def take_message(self) -> dict[str, int]:
        """Return the store's note to the pool."""
        return self.ask(
            lambda store: dict(store.take_message()) if implemented(store, "take_message") else {}, {}
        )
