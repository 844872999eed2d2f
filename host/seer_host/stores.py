"""The KV store a pool names: made once, and left alone once it has failed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import attrs
import numpy as np
import structlog

from seer_core.errors import tell_nobody
from seer_core.kv import KVStore, WiredStore
from seer_host.loader import Kind

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

__all__ = ["STORE", "Guarded", "Staged"]

log = structlog.get_logger("seer")

T = TypeVar("T")

STORE: Kind[KVStore] = Kind("KV store", KVStore, 'correct what [seer].kv_pool names, or set it to "none"')


NOTHING: Bytes = np.empty((0, 0), np.uint8)


@attrs.frozen
class Staged:
    """Blocks copied out of the store for a request, which its blocks from number ``first`` on will hold."""

    first: int
    blocks: Bytes


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

    def fetch(self, keys: Sequence[bytes], block_bytes: int) -> Bytes:
        """Copy out the blocks that the store has of the first keys, uint8 [blocks, block_bytes]."""

        def fetch(store: KVStore) -> Bytes:
            found = store.find(keys)
            if not found:
                return NOTHING
            blocks = np.empty((found, block_bytes), np.uint8)
            return blocks[: store.get(keys[:found], blocks)]

        return self.ask(fetch, NOTHING)

    def told(self, note: Mapping[str, int]) -> None:
        """Hand on what the pool has told."""
        self.ask(lambda store: store.told(note) if isinstance(store, WiredStore) else None, None)

    def note(self) -> dict[str, int]:
        """Return what the pool is to know."""
        return self.ask(lambda store: dict(store.note()) if isinstance(store, WiredStore) else {}, {})
