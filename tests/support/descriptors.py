"""Descriptors of this process: only those of some kinds, for libraries open and close others at any time."""

from __future__ import annotations

import os
from contextlib import suppress

__all__ = ["open_files"]


def open_files(*parts: str) -> set[str]:
    """Return what this process's descriptors are of, as far as that has one of these parts in its name.

    Pipes are ``pipe:[...]``, files without a name in memory ``/memfd:...``.
    """
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the listing itself
            found.add(os.readlink(f"/proc/self/fd/{name}"))
    return {each for each in found if any(part in each for part in parts)}
