"""The KV store a pool names: made once, and left alone once it has failed."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from typing import TypeVar

from seer_core.kv import KVStore
from seer_vllm.loader import Kind

__all__ = ["STORE", "Guarded"]

T = TypeVar("T")

STORE: Kind[KVStore] = Kind("KV store", KVStore, 'correct what [seer].kv_pool names, or set it to "none"')


class Guarded:
    """A store, as long as it works; without it everything is a miss."""

    def __init__(self, store: KVStore | None) -> None:
        self._store = store

    def ask(self, work: Callable[[KVStore], T], otherwise: T) -> T:
        """Do something with the store; give the store up if that raises, and say so."""
        if self._store is None:
            return otherwise
        try:
            return work(self._store)
        except Exception:
            traceback.print_exc()
            print("the KV pool failed; this instance goes on without it", file=sys.stderr, flush=True)
            self._store = None
            return otherwise
