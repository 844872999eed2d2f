"""Simulations side by side: one row per policy, one column per figure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

import msgspec
from rich.table import Table
from seer_cli.stats import Stats, ratios, spread

from seer_lab.bound import Bound
from seer_lab.shares import Shares
from seer_lab.simulate import SimulatedIteration

__all__ = [
    "FIGURES",
    "ShareRow",
    "TableRow",
    "bound_rows",
    "rows_of",
    "share_rows",
    "share_table",
    "table_of",
    "to_json",
]


class Figure(msgspec.Struct, frozen=True):
    """One column: its title, its value, how it is shown, and whether only where ``shown_if``."""

    title: str
    of: Callable[[SimulatedIteration], float]
    form: str = ",.0f"
    shown_if: Callable[[SimulatedIteration], object] = lambda run: True


FIGURES = {
    "total_time_s": Figure("total\ntime, s", lambda run: run.summary.total_time_s),
    "throughput_tokens_per_s": Figure("tokens\nper s", lambda run: run.throughput_tokens_per_s),
    "trajectories_per_hour": Figure(
        "trajectories\nper hour",
        lambda run: run.trajectories_per_hour,
        shown_if=lambda run: run.turns,
    ),
    "tail_time_s": Figure("tail\ntime, s", lambda run: run.summary.tail_time_s),
    "preemptions": Figure("preemp-\ntions", lambda run: run.summary.preemptions),
    "recomputed_tokens": Figure("recomputed\ntokens", lambda run: run.summary.recomputed_tokens),
    "pool_tokens": Figure(
        "tokens from\nthe KV pool",
        lambda run: run.summary.pool_tokens,
        shown_if=lambda run: run.summary.pool_tokens,
    ),
    "turn_kv_hits": Figure(
        "KV hits\nat turns",
        lambda run: run.turns.kv_hits if run.turns else 0.0,
        ".1%",
        shown_if=lambda run: run.turns,
    ),
    "turn_wait_s": Figure(
        "longest\nwait, s",
        lambda run: run.turns.longest_wait_s if run.turns else 0.0,
        ",.1f",
        shown_if=lambda run: run.turns,
    ),
    "idle_share": Figure("idle", lambda run: run.idle_share, ".1%"),
    "kv_usage": Figure("KV in\nuse", lambda run: run.kv_usage, ".1%"),
    "acceptance_length": Figure(
        "acceptance\nlength",
        lambda run: run.summary.acceptance_length,
        ".2f",
        shown_if=lambda run: run.summary.drafted_tokens,
    ),
    "mean_tokens": Figure(
        "mean\nresponse",
        lambda run: run.summary.mean_tokens,
        shown_if=lambda run: run.deferred_requests,
    ),
    "deferred_requests": Figure(
        "put\noff", lambda run: run.deferred_requests, shown_if=lambda run: run.deferred_requests
    ),
}
"""By the name under which ``--json`` writes them."""

THROUGHPUT = "throughput_tokens_per_s"
TOTAL_TIME = "total_time_s"


class TableRow(msgspec.Struct, frozen=True):
    """One policy: its simulations, one per seed, in the order of the seeds.

    ``bounds`` are those of the seeds; empty where there are none.
    """

    runs: list[SimulatedIteration]
    bounds: list[Bound] = []

    @property
    def stats(self) -> Stats:
        """The row's figures, run by run."""
        return Stats({name: [figure.of(run) for run in self.runs] for name, figure in FIGURES.items()})

    def ratios(self, base: TableRow) -> list[float]:
        """Return this policy's tokens per second over another's, seed by seed."""
        return ratios(self.stats.values[THROUGHPUT], base.stats.values[THROUGHPUT])

    @property
    def over_bound(self) -> list[float]:
        """The total time over the bound, seed by seed."""
        return [
            run.summary.total_time_s / bound.total_time_s
            for run, bound in zip(self.runs, self.bounds, strict=False)
        ]


def rows_of(
    simulations: Sequence[SimulatedIteration], bounds: Mapping[tuple[str, int], Bound] | None = None
) -> list[TableRow]:
    """Gather simulations by policy, in the order of their first, with bounds by policy and seed."""
    by_policy: dict[str, list[SimulatedIteration]] = {}
    for run in simulations:
        by_policy.setdefault(run.policy.name, []).append(run)
    bounds = bounds or {}
    return [
        TableRow(runs, [bounds[name, run.seed] for run in runs if (name, run.seed) in bounds])
        for name, runs in by_policy.items()
    ]


def table_of(rows: Sequence[TableRow]) -> Table:
    """Return the table that ``seer sim`` prints."""
    runs = [run for row in rows for run in row.runs]
    shown = {name: figure for name, figure in FIGURES.items() if any(figure.shown_if(run) for run in runs)}
    has_bounds = any(row.bounds for row in rows)
    table = Table()
    table.add_column("policy", no_wrap=True)
    for name, figure in shown.items():
        table.add_column(figure.title, justify="right")
        if name == THROUGHPUT:
            table.add_column("ratio", justify="right", no_wrap=True)
        elif name == TOTAL_TIME and has_bounds:
            table.add_column("over\nbound", justify="right", no_wrap=True)
    for row in rows:
        cells = [row.runs[0].policy.name]
        for name, figure in shown.items():
            cells.append(_cell(row.stats.values[name], figure.form))
            if name == THROUGHPUT:
                cells.append(_cell(row.ratios(rows[0]), ".2f", "x"))
            elif name == TOTAL_TIME and has_bounds:
                cells.append(_cell(row.over_bound, ".2f", "x") if row.bounds else "-")
        table.add_row(*cells)
    return table


def to_json(rows: Sequence[TableRow]) -> list[dict[str, Any]]:
    """Return one object per policy: medians, spreads, ratios to the first, and every run's summary."""
    documents = []
    for row in rows:
        policy = row.runs[0].policy
        documents.append(
            {
                "name": policy.name,
                "plugins": list(policy.plugins),
                "workload": row.runs[0].workload,
                "engine": row.runs[0].engine,
                "seeds": [run.seed for run in row.runs],
                **row.stats.to_json(),
                "ratio_to_first": row.stats.ratios(rows[0].stats),
                "throughput_ratios": row.ratios(rows[0]),
                **_bounds_to_json(row),
                "summaries": [msgspec.to_builtins(run.summary) for run in row.runs],
            }
        )
    return documents


def _bounds_to_json(row: TableRow) -> dict[str, Any]:
    """Return what is known of a row beside its bound, seed by seed."""
    document: dict[str, Any] = {}
    if row.bounds:
        document["bounds_s"] = [bound.total_time_s for bound in row.bounds]
        document["over_bound"] = row.over_bound
        document["bound_shares"] = [msgspec.to_builtins(bound.shares) for bound in row.bounds]
    if all(run.shares is not None for run in row.runs):
        document["shares"] = [msgspec.to_builtins(run.shares) for run in row.runs]
        document["kv_by_tenths"] = [run.kv_by_tenths for run in row.runs]
    return document


class ShareRow(msgspec.Struct, frozen=True):
    """Where the time went, under a name: shares by seed, and KV in use by tenths of the run."""

    name: str
    shares: list[Shares]
    kv_by_tenths: list[list[float]] = []


SHARES = {
    "floor": "steps'\nfloor",
    "attention": "atten-\ntion",
    "requests": "per re-\nquest",
    "prefill": "pre-\nfill",
    "drafts": "drafts",
    "idle": "idle",
}
"""Titles by field of ``Shares``."""


def share_rows(rows: Sequence[TableRow]) -> list[ShareRow]:
    """Return the policies that have shares, and below them each bound with and without drafts."""
    found = [
        ShareRow(
            row.runs[0].policy.name,
            [run.shares for run in row.runs if run.shares is not None],
            [run.kv_by_tenths for run in row.runs],
        )
        for row in rows
        if all(run.shares is not None for run in row.runs)
    ]
    return found + bound_rows(row.bounds for row in rows)


def bound_rows(bounds: Iterable[list[Bound]]) -> list[ShareRow]:
    """Return a row for each bound, given by seed for each policy, those without drafts first."""
    different: list[list[Bound]] = []
    for each in bounds:
        if each and each not in different:
            different.append(each)
    return [
        ShareRow("bound+drafts" if each[0].drafts else "bound", [bound.shares for bound in each])
        for each in sorted(different, key=lambda bounds: bounds[0].drafts)
    ]


def share_table(rows: Sequence[ShareRow], first: str = "policy") -> Table:
    """Return the table of shares: means over the seeds, which add up to 1 as well."""
    table = Table()
    table.add_column(first, no_wrap=True)
    for title in SHARES.values():
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("KV in use, %,\nby tenths of the run", no_wrap=True)
    for row in rows:
        cells = [f"{fmean(getattr(shares, name) for shares in row.shares):.1%}" for name in SHARES]
        tenths = [f"{100 * fmean(usage):2.0f}" for usage in zip(*row.kv_by_tenths, strict=True)]
        table.add_row(row.name, *cells, " ".join(tenths))
    return table


def _cell(values: Sequence[float], form: str, unit: str = "") -> str:
    median, least, most = spread(values)
    text = format(median, form) + unit
    return text if least == most else f"{text}\n[{least:{form}},\n {most:{form}}]"
