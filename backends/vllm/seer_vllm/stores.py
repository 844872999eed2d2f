"""The KV store a pool names: imported, checked, made."""

from __future__ import annotations

import importlib
import inspect
import traceback

from seer_core.errors import EngineError
from seer_core.kv import KVStore, StoreHost, StoreSpec

__all__ = ["make_store"]

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
