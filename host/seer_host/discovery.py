"""The offers of installed distributions, by groups of entry points, read once: 20 ms each time."""

from __future__ import annotations

import sys
from functools import cache
from importlib.metadata import EntryPoints, entry_points
from typing import Any

__all__ = ["REMEDIES", "TABLES", "offered"]

REMEDIES = "seer.remedies"
"""Functions that say, of the name of a plug-in that is not installed, how to install it, or nothing."""

TABLES = "seer.tables"
"""Further tables of a config, by name: the msgspec Struct of each, which a command reads."""


def offered(group: str) -> EntryPoints:
    """Return the entry points of a group, of everything installed; imports none."""
    found: EntryPoints = _offered_on(tuple(sys.path)).select(group=group)
    return found


@cache
def _offered_on(path: tuple[str, ...]) -> Any:  # of a class that Python 3.12 has no more
    return entry_points()
