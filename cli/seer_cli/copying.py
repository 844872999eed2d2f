"""The example plug-ins, one for each slot, and a copy of one under another name."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path

from seer_session.factories import SLOTS

__all__ = ["EXAMPLES", "EXAMPLE_SLOTS", "files_of"]

EXAMPLES = Path(__file__).parent / "examples"
"""A folder for each slot: a whole distribution, ``examples/plugins`` of the repository."""

EXAMPLE_SLOTS = tuple(slot for slot in SLOTS if slot != "launcher")
"""The slots with an example; a launcher stands on ``seer_worker``, and an example on the contract alone."""

COPIED = ("pyproject.toml", "README.md", "seer_*/*.py", "seer_*/py.typed", "tests/*.py")


def files_of(name: str, slot: str) -> Mapping[str, str]:
    """Return the files of a new plug-in, by path: the slot's example under the name, which is a valid one."""
    assert slot in EXAMPLE_SLOTS, f"there is no example of the slot {slot!r}"
    root = EXAMPLES / slot
    metadata = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))
    [own] = metadata["project"]["entry-points"]["seer"]

    def renamed(text: str) -> str:
        for spelt in (str, _dashed, _as_class):
            text = text.replace(spelt(own), spelt(name))
        return text

    files = sorted(file for pattern in COPIED for file in root.glob(pattern))
    return {renamed(file.relative_to(root).as_posix()): renamed(file.read_text("utf-8")) for file in files}


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def _as_class(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_"))
