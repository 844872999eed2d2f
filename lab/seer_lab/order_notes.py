"""Sentences below the table of ``seer sim``: what each row adds, and why one is below another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from seer_lab.policies import POLICIES, RECOMMENDED
from seer_lab.table import TableRow

__all__ = ["about_rows", "order_notes"]

BUILDS_ON = {"divided": "verl", "context": "divided", "posterior": "divided"}
"""A policy, and the one to which it adds something."""

ADDS = {
    "divided": "adds chunks, each on the instance that has room; first come, first served",
    "context": "adds an order to divided: the longest groups first, by their first responses",
    "posterior": "adds another order to divided: what may take longest first, by all lengths so far",
}
"""What such a policy adds."""

NOTHING_PREEMPTED = "nothing was preempted, so chunks had little to save"
LATE = "what chunks saved did not make up for a long response that ended late"
UNPREDICTED = "lengths so far predicted the others badly, or a long group came late all the same"


def about_rows(rows: Sequence[TableRow]) -> Iterator[str]:
    """Yield what each policy of a table is, those of the user's own left out."""
    for policy in (row.runs[0].policy for row in rows):
        if POLICIES.get(policy.name) == policy:
            recommended = " (recommended)" if policy.name == RECOMMENDED else ""
            yield f"{policy.name}{recommended}: {ADDS.get(policy.name, policy.about)}"


def order_notes(rows: Sequence[TableRow], *, drawn: bool) -> Iterator[str]:
    """Yield why a policy is below one to which it adds something, for each whose ratio in the table says so.

    ``drawn`` lengths have other seeds; recorded ones are what they are.
    """
    by_name = {row.runs[0].policy.name: row for row in rows}
    is_below = False
    for name, base in BUILDS_ON.items():
        if name in by_name and base in by_name and _is_below(by_name[name], by_name[base]):
            is_below = True
            yield f"{name} is below {base}: {_why(name, by_name[base])}"
    if drawn and is_below and all(len(row.runs) == 1 for row in rows):
        yield "One seed may be luck: --repeat 5 prints medians of five"


def _is_below(row: TableRow, base: TableRow) -> bool:
    return round(median(row.ratios(base)), 2) < 1  # as the table rounds: less cannot be seen there


def _why(name: str, base: TableRow) -> str:
    if name != "divided":
        return UNPREDICTED
    return LATE if any(run.summary.preemptions for run in base.runs) else NOTHING_PREEMPTED
