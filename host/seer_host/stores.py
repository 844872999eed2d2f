"""The KV store a pool names: made once, and left alone once it has failed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import structlog

from seer_core.errors import tell_nobody
from seer_core.kv import KVStore, WiredStore
from seer_host.loader import Kind

__all__ = ["STORE", "Guarded"]

log = structlog.get_logger("seer")

T = TypeVar("T")

STORE: Kind[KVStore] = Kind("KV store", KVStore, 'correct what [seer].kv_pool names, or set it to "none"')


class Guarded:
    """A store, as long as it works; without it everything is a miss."""

    def __init__(self, store: KVStore | None, tell: Callable[[str], None] = tell_nobody) -> None:
        self._store, self._tell = store, tell

    def ask(self, work: Callable[[KVStore], T], otherwise: T) -> T:
        """Do something with the store; give the store up if that raises, and tell."""
        if self._store is None:
            return otherwise
        try:
            return work(self._store)
        except Exception as error:
            log.exception("kv_store_failed")
            self._store = None
            self._tell(f"the KV store failed: {type(error).__name__}: {error}")
            return otherwise

    def told(self, note: Mapping[str, int]) -> None:
        """Hand on what the pool has told."""
        self.ask(lambda store: store.told(note) if isinstance(store, WiredStore) else None, None)

    def note(self) -> dict[str, int]:
        """Return what the pool is to know."""
        return self.ask(lambda store: dict(store.note()) if isinstance(store, WiredStore) else {}, {})
