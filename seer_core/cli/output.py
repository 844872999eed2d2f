"""Where a run's results go: completions as they finish, the trace, the summary."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from seer_core.errors import OutputError
from seer_core.model import Completion
from seer_core.trace import TraceWriter

__all__ = ["OutputDir", "check_writable", "write_json"]

FILES = ("completions.jsonl", "trace.jsonl", "summary.json")
BYTES_PER_REQUEST = 4096
"""Least free space asked for per request before work starts: tokens and log-probs of a short answer."""


class OutputDir:
    """A run's output directory, open; every completion is on disk when ``completion`` returns."""

    def __init__(self, path: str | Path, requests: int, overwrite: bool) -> None:
        """Create the directory and its files.

        Raises:
            OutputError: it cannot be written, is short of space, or holds an earlier run's results.
        """
        self.path = Path(path)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            earlier = [name for name in FILES if (self.path / name).exists()]
            if earlier and not overwrite:
                raise OutputError(
                    f"{self.path} already holds {', '.join(earlier)}; name another directory, or replace"
                    " them with --overwrite"
                )
            needed = requests * BYTES_PER_REQUEST
            free = shutil.disk_usage(self.path).free
            if free < needed:
                raise OutputError(
                    f"{self.path} has {free:,} bytes free; {requests:,} requests need at least {needed:,}."
                    " Free some space or name another directory"
                )
            self._completions = (self.path / "completions.jsonl").open("wb")
            self.trace = TraceWriter(self.path / "trace.jsonl")
            (self.path / "summary.json").unlink(missing_ok=True)
        except OSError as error:
            raise _unwritable(self.path, error) from error

    def __enter__(self) -> OutputDir:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            try:
                self._completions.close()
            finally:
                self.trace.close()
        except OSError as failure:
            if error is None:  # else what stays unwritten is the lesser trouble, or the very same
                raise _unwritable(self.path, failure) from failure

    def completion(self, completion: Completion) -> None:
        """Write one completion."""
        try:
            self._completions.write(msgspec.json.encode(completion, enc_hook=list) + b"\n")
            self._completions.flush()
        except OSError as error:
            raise _unwritable(self.path / "completions.jsonl", error) from error

    def summary(self, summary: dict[str, Any]) -> None:
        """Write the summary."""
        write_json(self.path / "summary.json", summary)


def write_json(path: str | Path, value: Any) -> None:
    """Write a value as indented JSON.

    Raises:
        OutputError: the file cannot be written.
    """
    try:
        Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")
    except OSError as error:
        raise _unwritable(Path(path), error) from error


def check_writable(path: str | Path) -> None:
    """Find out before work starts whether a result file can be written.

    Raises:
        OutputError: it cannot.
    """
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).open("ab").close()
    except OSError as error:
        raise _unwritable(Path(path), error) from error


def _unwritable(path: Path, error: OSError) -> OutputError:
    return OutputError(
        f"cannot write {path}: {error.strerror}; make room or name another place"
        " (what was written before is kept)"
    )
