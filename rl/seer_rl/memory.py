"""Memory that a trainer has freed, and that engines on its machine can use meanwhile."""

from __future__ import annotations

import ctypes

__all__ = ["give_back"]


def give_back() -> None:
    """Return to the system what has been freed, which glibc otherwise keeps for the next time."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries have none
    if trim is not None:
        trim(0)
