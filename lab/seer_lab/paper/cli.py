"""``seer reproduce``: the paper's tables and figures on simulated engines."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import click
from seer_cli.common import main_options
from seer_cli.output import check_writable, write_json
from seer_cli.tables import print_table, table_console
from seer_host.tables import nearest

from seer_core.errors import ConfigError, OutputError
from seer_lab.drawing import importing_to_draw
from seer_lab.paper.report import write_report
from seer_lab.paper.rows import ROWS, TABLES
from seer_lab.paper.runs import Runs, run_arms
from seer_lab.paper.show import Outcome, outcomes_of, summary_of, tables_of, to_json

__all__ = ["reproduce_command"]

NAMES = "\n".join(f"  {name:<16}{title}" for name, title in TABLES.items())

QUICK_SCALE = 1 / 32


@click.command(
    "reproduce",
    context_settings={"default_map": {"log_level": "warning"}},
    epilog=f"\b\nNames:\n{NAMES}",
)
@main_options
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option(
    "--seeds", type=click.IntRange(min=1), default=5, show_default=True, help="Iterations to average over."
)
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    default=os.cpu_count() or 1,
    show_default="one per core",
    metavar="N",
    help="Simulations at a time, of up to 1.5 GB each.",
)
@click.option("--quick", is_flag=True, help="One small iteration: to see that it works, in seconds.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write one object per number.")
@click.option(
    "--plots", type=click.Path(path_type=Path), help="Draw each table into this directory, as .svg."
)
@click.option("--report", type=click.Path(path_type=Path), help="Write a page of all tables; needs all.")
def reproduce_command(
    names: tuple[str, ...],
    seeds: int,
    jobs: int,
    quick: bool,
    json_file: Path | None,
    plots: Path | None,
    report: Path | None,
) -> None:
    """Simulate the evaluation of arXiv 2511.14617, and show each of its numbers beside ours.

    NAME is one of the tables below, or all, which is the default and takes some minutes.  What
    is said of veRL was fitted, acceptance lengths are inputs; everything else is predicted.

    \b
    Example:
      seer reproduce ablation length-context
      seer reproduce all --report docs/results/reproduction.md --json reproduction.json
    """
    for name in names:
        if name not in (*TABLES, "all"):
            known = ", ".join(TABLES)
            raise ConfigError(f"there is no table {name!r} (there are all, {known}){nearest(name, TABLES)}")
    chosen = set(TABLES) if not names or "all" in names else set(names)
    if report is not None and chosen != set(TABLES):
        raise ConfigError("--report writes a page of all tables; leave the names out")
    check_writable(json_file, report)
    draw = None if plots is None else _drawing(plots)
    rows = [row for row in ROWS if row.table in chosen]
    count = 1 if quick else seeds
    arms = [arm for row in rows for arm in row.arms]
    runs = run_arms(arms, range(count), QUICK_SCALE if quick else None, jobs=jobs, report=_report)
    outcomes = outcomes_of(rows, runs)
    if json_file is not None:
        write_json(json_file, to_json(outcomes))
    if report is not None:
        write_report(report, outcomes, count, f"seer reproduce all --seeds {count}")
    if draw is not None and plots is not None:
        draw(plots, outcomes, runs)
    console = table_console()
    for table in tables_of(outcomes):
        print_table(table, keys=2)
    console.print(summary_of(outcomes))


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _drawing(directory: Path) -> Callable[[Path, Sequence[Outcome], Runs], None]:
    """Import what draws and make the directory, or say what is missing, before any work starts.

    Raises:
        ConfigError: matplotlib is missing.
        OutputError: there can be no such directory.
    """
    with importing_to_draw(None, "--plots", "--plots"):
        from seer_lab.paper.plots import draw_all
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot make {directory}: {error.strerror}; name another place") from error
    return draw_all
