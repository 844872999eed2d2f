"""``seer export``: a run's trace for other tools, as lanes over time or as a table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import msgspec
from seer_trace.chunk_runs import ChunkFollower, ChunkRun
from seer_trace.records import TraceRecord, read_trace

from seer_cli.chunk_tables import check_parquet, write_csv, write_parquet
from seer_cli.common import main_options
from seer_cli.output import TRACE, InputPath, check_writable, replacing
from seer_cli.perfetto import trace_events
from seer_core.errors import InputError

__all__ = ["export_command"]


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
@click.option(
    "--parquet",
    "parquet_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the same table as Parquet, with types; needs pyarrow.",
)
def export_command(
    directory: Path, perfetto_file: Path | None, csv_file: Path | None, parquet_file: Path | None
) -> None:
    """Write the run of DIRECTORY for other tools.

    In a viewer of traces each instance is a process, its slots are lanes, a chunk is
    a slice, and a request that moved is an arrow from slice to slice.

    \b
    Example:
      seer export out/first --perfetto first.json --csv chunks.csv
      seer export out/first --parquet chunks.parquet
    """
    if perfetto_file is None and csv_file is None and parquet_file is None:
        raise InputError("nothing to write: name a file with --perfetto, --csv or --parquet")
    check_writable(perfetto_file, csv_file, parquet_file)
    if parquet_file is not None:
        check_parquet()
    trace = directory / TRACE
    if perfetto_file is not None:
        events = _write_events(perfetto_file, trace_events(read_trace(trace)))
        click.echo(f"{perfetto_file}: {events:,} events")
    if csv_file is not None:
        chunks = write_csv(csv_file, _chunks_of(read_trace(trace)))
        click.echo(f"{csv_file}: {chunks:,} chunks")
    if parquet_file is not None:
        chunks = write_parquet(parquet_file, _chunks_of(read_trace(trace)))
        click.echo(f"{parquet_file}: {chunks:,} chunks")


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
