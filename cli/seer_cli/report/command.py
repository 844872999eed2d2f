"""``seer report``: one HTML page about a run, or about several side by side."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from seer_host.json_files import JsonFormat
from seer_trace.records import TraceRecord, read_trace

from seer_cli.common import main_options
from seer_cli.garbage_collection import no_collections
from seer_cli.output import JSON_OPTION, TRACE, InputPath, check_writable, names_of_runs, write_json
from seer_core.errors import InputError, printable

if TYPE_CHECKING:
    from seer_cli.report.data import RunData

__all__ = ["read_run", "report_command"]

SUMMARY = "summary.json"
PROGRESS_EVERY_S = 5.0

_SUMMARIES = JsonFormat[dict[str, Any]](
    dict[str, Any], "not the summary of a run", "name the directory of a `seer run`", InputError
)


@click.command("report")
@main_options
@click.argument("directories", nargs=-1, required=True, type=InputPath(), metavar="DIR...")
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="The page to write.  [default: report.html in the first DIR]",
)
@JSON_OPTION
def report_command(directories: tuple[Path, ...], out: Path | None, json_file: Path | None) -> None:
    """Write an HTML page about the run of DIR: what cost most of its time, and why its last responses were
    late.

    Of several runs it shows the differences first.  The page needs no network and no server: open the file in
    a browser.  A run that goes on is shown as far as it has come.

    \b
    Example:
      seer report out/first
      seer report out/verl out/seer --out both.html
    """
    page = out if out is not None else directories[0] / "report.html"
    check_writable(page, json_file)
    from seer_cli.report.page import write_page

    names = names_of_runs(directories)
    runs = [read_run(directory, name) for directory, name in zip(directories, names, strict=True)]
    write_page(page, f"Seer: {' and '.join(names)}", runs)
    if json_file is not None:
        write_json(json_file, runs)
    for run in runs:
        prefix = f"{printable(run.name)}: " if len(runs) > 1 else ""
        for finding in run.findings[:3]:
            click.echo(f"{prefix}{finding.title} (at most {finding.share:.0%} of the time). {finding.text}")
    click.echo(f"{page}: {page.stat().st_size / 1e6:.1f} MB")


def read_run(directory: Path, name: str, bound_s: float | None = None) -> RunData:
    """Return what a page shows of the run of a directory.

    Raises:
        InputError: it has no trace, or one without groups.
    """
    from seer_cli.report.data import run_of  # numpy, which no other command needs at its start
    from seer_cli.report.reading import RunReader

    reader = RunReader()
    with no_collections():
        for record in _with_progress(read_trace(directory / TRACE), name):
            reader.read(record)
    if not reader.requests:
        raise InputError(f"the trace in {directory} has no groups yet; wait until the run has begun")
    path = directory / SUMMARY
    summary = _SUMMARIES.read(path) if path.exists() else {}
    return run_of(reader, name, summary, bound_s)


def _with_progress(records: Iterator[TraceRecord], name: str) -> Iterator[TraceRecord]:
    """Say now and then how far the reading of a long trace is."""
    shown = time.monotonic()
    for number, record in enumerate(records):
        if number % 10_000 == 0 and time.monotonic() - shown > PROGRESS_EVERY_S:
            shown = time.monotonic()
            print(f"{printable(name)}: {number:,} events read", file=sys.stderr, flush=True)
        yield record
