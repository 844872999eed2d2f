"""The packages of this repository and the entry points that they declare; no other one counts."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

from reference.page import ROOT

__all__ = ["FOLDERS", "packages", "repository_entry_points", "version"]

FOLDERS = (
    *("plugins", "backends", "serving", "training", "contrib"),
    *("cli", "host", "lab", "session", "testing", "trace"),
)


def packages() -> dict[str, Path]:
    """Return the folder of each import package of ours, by its name."""
    found = [ROOT / "seer_core", *(path for folder in FOLDERS for path in _within(folder, "seer_*"))]
    return {path.name: path for path in found if path.is_dir()}


def repository_entry_points(group: str) -> Iterator[EntryPoint]:
    """Yield the entry points that our distributions declare, by name."""
    for file in (file for folder in FOLDERS for file in _within(folder, "pyproject.toml")):
        declared = tomllib.loads(file.read_text())["project"].get("entry-points", {}).get(group, {})
        for name, value in sorted(declared.items()):
            yield EntryPoint(name, value, group)


def _within(folder: str, pattern: str) -> list[Path]:
    return sorted([*ROOT.glob(f"{folder}/{pattern}"), *ROOT.glob(f"{folder}/*/{pattern}")])


def version(distribution: str) -> str:
    """Return the version of one of our distributions, as its pyproject.toml has it."""
    for file in (file for folder in FOLDERS for file in _within(folder, "pyproject.toml")):
        project = tomllib.loads(file.read_text())["project"]
        if project["name"] == distribution:
            return str(project["version"])
    raise LookupError(f"no distribution of this repository is called {distribution}")
