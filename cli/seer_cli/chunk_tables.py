"""The chunks of a run as a table, a row each: CSV, or Parquet with types."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
from seer_host.installation import how_to_install
from seer_host.json_files import describe_flaw
from seer_trace.chunk_runs import FIGURES, ChunkRun

from seer_cli.output import replacing
from seer_core.errors import ConfigError, InputError

__all__ = ["COLUMNS", "check_parquet", "write_csv", "write_parquet"]

COLUMNS: dict[str, str] = {
    "request_id": "string",
    "instance_id": "string",
    "begin_s": "float64",
    "end_s": "float64",
    "end": "string",
    "max_tokens": "int64",
    **dict.fromkeys(FIGURES, "int64"),
    "kv_tokens": "int64",
    "migrated": "bool",
    "why": "string",
}
"""The columns with their types in Parquet; times are seconds on the run's clock.

The figures of a chunk that brought nothing are null, in CSV empty.
"""

ROWS = 65_536
"""Rows of a Parquet file that are written at a time."""


def write_csv(path: Path, chunks: Iterable[ChunkRun]) -> int:
    """Write chunks as CSV, and return how many."""
    count = 0
    with replacing(path) as new, new.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for row in _rows(chunks):
            count += 1
            writer.writerow([row.get(name, "") for name in COLUMNS])
    return count


def check_parquet() -> None:
    """Raise ConfigError if the library that writes Parquet is not installed."""
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError as error:
        remedy = how_to_install("parquet", "`make setup`")
        raise ConfigError(f"--parquet needs the library pyarrow ({error}); {remedy}") from error


def write_parquet(path: Path, chunks: Iterable[ChunkRun]) -> int:
    """Write chunks as Parquet, and return how many; ``check_parquet`` comes first.

    Raises:
        InputError: a number of a damaged trace needs more than 64 bits.
    """
    import pyarrow
    from pyarrow.parquet import ParquetWriter

    schema = pyarrow.schema([(name, pyarrow.type_for_alias(kind)) for name, kind in COLUMNS.items()])
    count, rows = 0, _rows(chunks)
    with replacing(path) as new, new.open("wb") as file, ParquetWriter(file, schema) as writer:
        while batch := list(islice(rows, ROWS)):
            count += len(batch)
            try:
                writer.write_batch(pyarrow.RecordBatch.from_pylist(batch, schema=schema))
            except (ValueError, OverflowError) as error:
                raise InputError(
                    f"the trace holds what Parquet cannot: {describe_flaw(error)}; use --csv"
                ) from error
    return count


def _rows(chunks: Iterable[ChunkRun]) -> Iterator[dict[str, Any]]:
    """Yield the fields of each chunk, and of what it brought, by name."""
    for chunk in chunks:
        result = {} if chunk.result is None else msgspec.structs.asdict(chunk.result)
        yield result | msgspec.structs.asdict(chunk)
