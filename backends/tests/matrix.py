"""Families of models, compared with the stored matrix."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from bench import render
from bench.models import WAYS, FamilyRun

__all__ = ["expect_the_matrix_to_say_so", "rows_of"]


def rows_of(engine: str) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the rows of an engine in the matrix, by runner and family."""
    rows = render.results()["models"].rows
    return {(row.get("runner", "first"), row["family"]): row for row in rows if row["engine"] == engine}


def expect_the_matrix_to_say_so(engine: str, runner: str, name: str, folder: Path) -> None:
    """Roll a family out and compare with its row; how many responses differ is of no account."""

    def outcomes(row: dict[str, Any]) -> dict[str, str]:
        return {way: "differ" if row[way].endswith("differ") else row[way] for way in WAYS}

    found = asyncio.run(FamilyRun(engine, name, folder, runner=runner).row())
    assert outcomes(found) == outcomes(rows_of(engine)[runner, name])
