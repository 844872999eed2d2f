"""``seer export``: a run's trace for other tools, as lanes over time or as a table."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import msgspec

from seer_cli.common import main_options
from seer_cli.output import TRACE, InputPath, check_writable, replacing
from seer_cli.perfetto import trace_events
from seer_core.errors import InputError
from seer_core.model.chunk_runs import FIGURES, ChunkFollower, ChunkRun
from seer_core.scheduling.trace import TraceRecord, read_trace

__all__ = ["COLUMNS", "export_command"]

COLUMNS = (
    "request_id",
    "instance_id",
    "begin_s",
    "end_s",
    "end",
    "max_tokens",
    *FIGURES,
    "kv_tokens",
    "migrated",
    "why",
)
"""The columns of the table of chunks; times are seconds on the run's clock."""


@click.command("export")
@main_options
@click.argument("directory", type=InputPath())
@click.option(
    "--perfetto",
    "perfetto_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write trace events as JSON: open it in Perfetto's viewer or in chrome://tracing.",
)
@click.option(
    "--csv",
    "csv_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write a table with a row for each chunk.",
)
def export_command(directory: Path, perfetto_file: Path | None, csv_file: Path | None) -> None:
    """Write the run of DIRECTORY for other tools.

    In a viewer of traces each instance is a process, its slots are lanes, a chunk is
    a slice, and a request that moved is an arrow from slice to slice.

    \b
    Example:
      seer export out/first --perfetto first.json --csv chunks.csv
    """
    if perfetto_file is None and csv_file is None:
        raise InputError("nothing to write: name a file with --perfetto or --csv")
    check_writable(perfetto_file, csv_file)
    trace = directory / TRACE
    if perfetto_file is not None:
        events = _write_events(perfetto_file, trace_events(read_trace(trace)))
        click.echo(f"{perfetto_file}: {events:,} events")
    if csv_file is not None:
        chunks = _write_table(csv_file, _chunks_of(read_trace(trace)))
        click.echo(f"{csv_file}: {chunks:,} chunks")


def _write_events(path: Path, events: Iterable[Mapping[str, Any]]) -> int:
    """Write trace events as one JSON object, a line each, and return how many."""
    encoder, count = msgspec.json.Encoder(), 0
    with replacing(path) as new, new.open("wb") as file:
        file.write(b'{"displayTimeUnit":"ms","traceEvents":[')
        for event in events:
            file.write((b",\n" if count else b"\n") + encoder.encode(event))
            count += 1
        file.write(b"\n]}\n")
    return count


def _chunks_of(records: Iterable[TraceRecord]) -> Iterator[ChunkRun]:
    """Yield all chunks of a trace, each when it is over."""
    follower = ChunkFollower()
    for record in records:
        yield from follower.read(record.now, record.event, record.commands)
    yield from follower.rest()


def _write_table(path: Path, chunks: Iterable[ChunkRun]) -> int:
    """Write chunks as CSV, and return how many."""
    count = 0
    with replacing(path) as new, new.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for chunk in chunks:
            count += 1
            result = {} if chunk.result is None else msgspec.structs.asdict(chunk.result)
            row = result | msgspec.structs.asdict(chunk)
            writer.writerow([row.get(name, "") for name in COLUMNS])
    return count
