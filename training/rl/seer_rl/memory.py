"""Memory that a trainer has freed, returned to the system for the engines on its machine."""

from __future__ import annotations

import ctypes

__all__ = ["return_freed_memory"]


def return_freed_memory() -> None:
    """Return to the system what has been freed, which glibc otherwise keeps for the next time."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries have none
    if trim is not None:
        trim(0)
