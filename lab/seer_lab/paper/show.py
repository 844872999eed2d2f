"""Ours beside the paper's: outcomes as a table for terminals, as Markdown, and as plain data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

import msgspec
from rich.table import Table

from seer_lab.paper.rows import TABLES, PaperRow
from seer_lab.paper.runs import Runs

__all__ = [
    "Outcome",
    "by_table",
    "errors",
    "markdown_of",
    "outcomes_of",
    "summary_of",
    "tables_of",
    "to_json",
]

SMALL = 0.05
"""Paper values below this are shares of next to nothing: no relative error is taken of them."""


class Outcome(msgspec.Struct, frozen=True):
    """A row with our number."""

    row: PaperRow
    ours: float

    @property
    def error(self) -> float | None:
        """Relative error, or None where the paper's number is all but zero."""
        paper = self.row.paper
        return None if paper < SMALL else self.ours / paper - 1


def outcomes_of(rows: Iterable[PaperRow], runs: Runs) -> list[Outcome]:
    """Take our number for each row out of the simulations."""
    return [Outcome(row, row.of(runs)) for row in rows]


def errors(outcomes: Iterable[Outcome]) -> list[float]:
    """Return the sizes of the relative errors of what was predicted."""
    found = [each.error for each in outcomes if each.row.kind == "predicted"]
    return [abs(error) for error in found if error is not None]


def summary_of(outcomes: Iterable[Outcome]) -> str:
    """Return a sentence on how far off the predictions are; empty without any."""
    sizes = errors(outcomes)
    if not sizes:
        return ""
    within = sum(size <= 0.1 for size in sizes)
    return (
        f"{within} of {len(sizes)} predictions are within 10 %, and the median error is {median(sizes):.1%}"
    )


def tables_of(outcomes: Sequence[Outcome]) -> list[Table]:
    """Return one table per table of the paper."""
    tables = []
    for name, here in by_table(outcomes):
        table = Table(title=f"{name}: {TABLES[name]}", title_justify="left", caption=summary_of(here))
        table.add_column("workload", no_wrap=True)
        table.add_column("", overflow="fold")
        for title in ("paper", "here", "error"):
            table.add_column(title, justify="right", no_wrap=True)
        table.add_column("", no_wrap=True)
        for outcome in here:
            table.add_row(*_cells(outcome))
        tables.append(table)
    return tables


def markdown_of(outcomes: Sequence[Outcome], table: str) -> str:
    """Return one table of the paper in Markdown."""
    lines = ["| workload | | paper | here | error | |", "|---|---|---:|---:|---:|---|"]
    here = [outcome for outcome in outcomes if outcome.row.table == table]
    lines += [f"| {' | '.join(_cells(outcome))} |" for outcome in here]
    return "\n".join([*lines, "", summary_of(here)]).rstrip()


def to_json(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Return one object per row."""
    return [
        {
            "table": outcome.row.table,
            "workload": outcome.row.workload,
            "name": outcome.row.name,
            "kind": outcome.row.kind,
            "paper": outcome.row.paper,
            "here": outcome.ours,
            "error": outcome.error,
        }
        for outcome in outcomes
    ]


def by_table(outcomes: Sequence[Outcome]) -> list[tuple[str, list[Outcome]]]:
    """Return the outcomes of each table that has any, in the paper's order."""
    named = [(name, [each for each in outcomes if each.row.table == name]) for name in TABLES]
    return [(name, here) for name, here in named if here]


def _cells(outcome: Outcome) -> tuple[str, ...]:
    row, error = outcome.row, outcome.error
    return (
        row.workload,
        row.name,
        format(row.paper, row.form),
        format(outcome.ours, row.form),
        "" if error is None else f"{error:+.1%}",
        "" if row.kind == "predicted" else row.kind,
    )
