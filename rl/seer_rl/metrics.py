"""``metrics.jsonl``: a line for each iteration, also after a process was killed while it wrote one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import structlog

from seer_core.errors import OutputError
from seer_core.files import LineFile
from seer_core.reading import Form, read_bytes

__all__ = ["METRICS", "metrics_file", "records"]

METRICS = "metrics.jsonl"
REMEDY = "move it away"

log = structlog.get_logger("seer")


class _Line(msgspec.Struct):
    iteration: int


FORM: Form[_Line] = Form(_Line, "no metrics", REMEDY, OutputError)


def records(out: Path) -> list[dict[str, Any]]:
    """Return the metrics in a directory, a mapping for each iteration; without a last line that is cut.

    Raises:
        OutputError: they cannot be read.
    """
    return [msgspec.json.decode(line) for line in _lines(out / METRICS)]


@contextmanager
def metrics_file(out: Path, done: int) -> Iterator[LineFile]:
    """Open the metrics with the lines of the iterations that are done; what came after is done again.

    Raises:
        OutputError: they cannot be read or written.
    """
    path = out / METRICS
    kept = [line for line in _lines(path) if msgspec.json.decode(line, type=_Line).iteration < done]
    try:
        file = LineFile(path, hidden=True)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}; name another directory") from error
    try:
        for line in kept:
            file.write(line)
        file.show()
        yield file
    finally:
        file.close()


def _lines(path: Path) -> list[bytes]:
    """Return the lines that are whole; a process that is killed, or a full disk, may cut the last one."""
    if not path.exists():
        return []
    *lines, last = read_bytes(path, REMEDY, OutputError).split(b"\n")
    for number, line in enumerate(lines, 1):
        FORM.decode(line, f"{path}:{number}:")
    if last:
        try:
            FORM.decode(last, f"{path}:{len(lines) + 1}:")
        except OutputError:
            log.warning("metrics_cut", reason=f"{path} ends in a line that is cut; it is left out")
        else:
            lines.append(last)
    return lines
