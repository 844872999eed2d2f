"""A generated page: where it lies, how it is built, and the flaws that are found meanwhile."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from reference.fields import Field, fields_of

__all__ = ["GENERATED", "PAGES", "ROOT", "Page", "markdown"]

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "reference"
GENERATED = "<!-- `python -m reference` writes this page: change the docstrings of the code instead. -->"
CODE = re.compile(r"``([^`]+)``")
ENTRIES = re.compile(r"(Raises|Args):\n((?:    .*\n?)+)")


class Page:
    """A page of Markdown that is being built; ``flaws`` are sentences about missing meanings."""

    def __init__(self, name: str, title: str, *introduction: str) -> None:
        self.name = name
        self.flaws: list[str] = []
        self._parts = [f"{GENERATED}\n# {title}", *introduction]

    @property
    def text(self) -> str:
        """The whole page."""
        return "\n\n".join(part for part in self._parts if part) + "\n"

    def heading(self, level: int, title: str) -> None:
        """Begin a section."""
        self._parts.append(f"{'#' * level} {title}")

    def add(self, *parts: str) -> None:
        """Add paragraphs as they are."""
        self._parts += parts

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """Add a table, unless it has no rows."""
        cells = [[" ".join(cell.split()).replace("|", "\\|") for cell in row] for row in rows]
        if cells:
            lines = [columns, ["---"] * len(columns), *cells]
            self._parts.append("\n".join(f"| {' | '.join(line)} |" for line in lines))

    def fields(self, struct: type, prefix: str = "") -> list[Field]:
        """Add a table of a struct's fields, and return them; one without a meaning is a flaw."""
        found = fields_of(struct)
        self.require_meanings(struct, found)
        columns = ["key", "type", "range", "default", "unit", "meaning"]
        used = [True, True, *(any(getattr(each, name) for each in found) for name in columns[2:5]), True]
        rows = [
            (f"`{prefix}{each.name}`", each.type, each.range, each.default, each.unit, markdown(each.meaning))
            for each in found
        ]
        self.table(
            [column for column, wanted in zip(columns, used, strict=True) if wanted],
            [[cell for cell, wanted in zip(row, used, strict=True) if wanted] for row in rows],
        )
        return found

    def require_meanings(self, struct: type, found: Iterable[Field]) -> None:
        """Note the fields that have no meaning."""
        self.flaws += [
            f"{each.owner}.{each.name} has no meaning: write one as a string below the field"
            for each in found
            if not each.meaning
        ]
        if not struct.__doc__:
            self.flaws.append(f"{struct.__module__}.{struct.__qualname__} has no docstring: write one")


def markdown(docstring: str) -> str:
    """Return a docstring, or the meaning of a field, as Markdown."""
    text = CODE.sub(r"`\1`", inspect.cleandoc(docstring))
    text = ENTRIES.sub(_entries, text + "\n").strip()
    return re.sub(r"(?<=[.?!:])  (?=\S)", " ", text)


def _entries(match: re.Match[str]) -> str:
    entries = re.sub(r"\n {8}", " ", match[2].rstrip("\n")).strip().split("\n")
    lines = [entry.strip().partition(":") for entry in entries]
    return f"{match[1]}:\n\n" + "\n".join(f"- `{name}`:{text}" for name, _, text in lines) + "\n"
