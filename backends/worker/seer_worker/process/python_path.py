"""Another PYTHONPATH for a process that has imported modules by its own, where that makes no difference."""

from __future__ import annotations

import os
import sys
from configparser import ConfigParser, Error
from pathlib import Path

__all__ = ["clash_of", "replace_path"]

AT_START = ("sitecustomize", "usercustomize")
"""Modules that Python imports by itself when it starts."""


def clash_of(wanted: str) -> str | None:
    """Return why this process would have other modules had it been started with PYTHONPATH ``wanted``."""
    old, new = _entries(os.environ.get("PYTHONPATH", "")), _entries(wanted)
    if [entry for entry in old if entry in new] != [entry for entry in new if entry in old]:
        return "PYTHONPATH has its directories in another order"
    imported = {name.partition(".")[0] for name in sys.modules}
    for entry in new:
        if entry not in old:
            names = _names_in(entry)
            twice = sorted(names & imported) + sorted(names.intersection(AT_START))
            if twice:
                return f"{entry}, of PYTHONPATH, has {twice[0]!r}, and it was imported from elsewhere"
            extended = sorted(_groups_in(entry) & imported)
            if extended:
                return f"{entry}, of PYTHONPATH, has a plug-in of {extended[0]!r}, and that was imported"
    for entry in old:
        if entry not in new:
            taken = sorted(_names_in(entry) & imported)
            if taken:
                return f"it has imported {taken[0]!r} from {entry}, which PYTHONPATH no longer has"
    return None


def replace_path(wanted: str) -> None:
    """Change ``sys.path`` as a start with PYTHONPATH ``wanted`` would have; the variable changes after it."""
    old = _entries(os.environ.get("PYTHONPATH", ""))
    sys.path[:] = [*_entries(wanted), *(entry for entry in sys.path if entry not in old)]
    sys.path_importer_cache.clear()


def _entries(path: str) -> list[str]:
    return list(dict.fromkeys(os.path.abspath(entry) for entry in path.split(os.pathsep) if entry))


def _names_in(entry: str) -> set[str]:
    """Return the names that can be imported from a directory, and some more."""
    try:
        return {name.partition(".")[0] for name in os.listdir(entry)}
    except OSError:
        return set()


def _groups_in(entry: str) -> set[str]:
    """Return the packages for which distributions in a directory have plug-ins, as their entry points say."""
    found: set[str] = set()
    for path in Path(entry).glob("*.*-info/entry_points.txt"):
        parser = ConfigParser(delimiters=("=",), interpolation=None, strict=False)
        try:
            parser.read(path, "utf-8")
        except (Error, UnicodeDecodeError):
            continue  # importlib.metadata could not read it either
        found.update(section.partition(".")[0] for section in parser.sections())
    return found
