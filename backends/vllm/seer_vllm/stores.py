"""The KV store a pool names: imported, checked, made, and left alone once it has failed."""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable
from typing import TypeVar

from seer_core.errors import EngineError
from seer_core.kv import KVStore, StoreHost, StoreSpec

__all__ = ["Guarded", "make_store"]

T = TypeVar("T")

REMEDY = 'correct what [seer].kv_pool names, or set it to "none"'


def make_store(spec: StoreSpec, host: StoreHost) -> KVStore:
    """Make the store for an instance.

    Raises:
        EngineError: it cannot be imported, is no ``KVStore``, or cannot be made here.
    """
    module_name, _, name = spec.path.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise EngineError(f"KV store {spec.path!r} cannot be imported: {error}; {REMEDY}") from error
    methods = [name for name, _ in inspect.getmembers(KVStore, inspect.isfunction) if name[0] != "_"]
    missing = [name for name in methods if not callable(getattr(found, name, None))]
    if missing:
        raise EngineError(f"KV store {spec.path!r} is no KVStore: without {', '.join(missing)}; {REMEDY}")
    try:
        store: KVStore = found(spec.settings, host)
    except EngineError:
        raise
    except Exception as error:
        traceback.print_exception(error)
        raise EngineError(
            f"KV store {spec.path!r} cannot be made: {type(error).__name__}: {error}; {REMEDY}"
        ) from error
    return store


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
