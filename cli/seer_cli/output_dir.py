"""The directory of a run: its results as they come, and the journal with which it can be gone on with."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import msgspec
from seer_host.line_files import LineFile, claim
from seer_journal import DiskJournal, Safety
from seer_trace.records import TraceWriter

from seer_cli.output import RUN_FILES, TRACE, unwritable, write_json
from seer_cli.status import StatusFile
from seer_core.errors import OutputError
from seer_core.model import Completion

__all__ = ["OutputDir"]

COMPLETIONS = "completions.jsonl"
JOURNAL = "journal"
"""The directory of the journal within a run's."""

BYTES_PER_REQUEST = 4096
"""Least free space asked for per request before work starts: tokens and log-probs of a short answer."""


class OutputDir:
    """A run's output directory, open, for one process at a time.

    Every completion is with the operating system when ``completion`` returns.  Until ``begin`` the files have
    other names: a run that never begins leaves nothing, and what an earlier run wrote is still there.
    ``journal`` is the open one, None before ``open_journal`` and without one.
    """

    def __init__(
        self, path: str | Path, requests: int, *, overwrite: bool = False, resume: bool = False
    ) -> None:
        """Create the directory and its files.

        Raises:
            OutputError: it cannot be written, is short of space, another run writes there, or it holds an
                earlier run's results, which this one may neither replace nor go on with.
        """
        self.path = Path(path)
        self.begun = False
        self.journal: DiskJournal | None = None
        self.status = StatusFile(self.path)
        self._overwrite, self._resume = overwrite, resume
        self._made: list[Path] = []
        with contextlib.ExitStack() as undo:
            undo.callback(self._remove_made)
            try:
                self._made = [each for each in (self.path, *self.path.parents) if not each.exists()]
                self.path.mkdir(parents=True, exist_ok=True)
                undo.enter_context(claim(self.path, f"another run writes into {self.path}"))
                self._refuse_earlier()
                self._refuse_narrow(requests * BYTES_PER_REQUEST)
                self._remove_hidden()
                self.status.enter("starting")
                undo.callback(self.status.remove)
                self._completions = LineFile(self.path / COMPLETIONS, hidden=True)
                undo.callback(self._completions.close)
                self.trace = TraceWriter(self.path / TRACE, hidden=True)
                undo.callback(self.trace.close)
            except OSError as error:
                raise unwritable(self.path, error) from error
            self._undo = undo.pop_all()

    @staticmethod
    def finished(path: Path) -> dict[str, Any] | None:
        """Return the summary of a directory's run if that ended by itself and all its responses are there."""
        summary = _ended(path)
        return summary if summary and summary.get("requests") == _lines(path / COMPLETIONS) else None

    @classmethod
    def remove_journal(cls, path: Path) -> None:
        """Delete the journal of a finished run whose process was killed before it had deleted it."""
        with contextlib.suppress(OSError, OutputError), claim(path, f"another run writes into {path}"):
            if cls.finished(path) is not None:
                shutil.rmtree(path / JOURNAL, ignore_errors=True)

    def open_journal(self, facts: Mapping[str, str], safety: Safety | Literal["none"]) -> DiskJournal | None:
        """Open the journal, an earlier run's if this one goes on with it; None where none is wanted.

        Raises:
            InputError: it is of another run, or damaged.
            OutputError: it cannot be written.
        """
        if self._overwrite:
            shutil.rmtree(self.path / JOURNAL, ignore_errors=True)
        if safety != "none":
            self.journal = DiskJournal(self.path / JOURNAL, facts=facts, safety=safety)
        return self.journal

    def begin(self, completions: Iterable[Completion] = ()) -> None:
        """Put the files in the place of an earlier run's, now that there is something to write.

        ``completions`` of an earlier process are in them from the start.

        Raises:
            OutputError: they cannot be.
        """
        for completion in completions:
            self._write(completion)
        try:
            (self.path / "summary.json").unlink(missing_ok=True)
            self._completions.show()
            self.trace.file.show()
        except OSError as error:
            raise unwritable(self.path, error) from error
        self.begun = True

    def completion(self, completion: Completion) -> None:
        """Write one completion of a run that has begun.

        Raises:
            OutputError: it cannot be written, or the directory was deleted meanwhile.
        """
        assert self.begun
        if self._completions.deleted:
            raise OutputError(
                f"{self._completions.path} was deleted while the run wrote it; start the run again, and leave"
                " its directory where it is"
            )
        self._write(completion)

    def summary(self, summary: dict[str, Any]) -> None:
        """Write the summary of a run that has begun; one that has finished needs no journal any more."""
        assert self.begun
        write_json(self.path / "summary.json", summary)
        if summary["ended"] == "finished" and self.journal is not None:
            self.journal.remove()

    def __enter__(self) -> OutputDir:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.journal is not None:
            self.journal.close()
            if not self.begun and not self._resume:
                self.journal.remove()
        if self.begun:
            self._made = []
        try:
            self._undo.close()
        except OSError as failure:
            if error is None:  # else what stays unwritten is the lesser trouble, or the very same
                raise unwritable(self.path, failure) from failure

    def _refuse_earlier(self) -> None:
        earlier = [name for name in RUN_FILES if (self.path / name).exists()]
        journal = (self.path / JOURNAL).exists() and not self.finished(self.path)
        if self._overwrite or (self._resume and (journal or not earlier)):
            return
        if self._resume:
            held = f"holds {', '.join(earlier)}"
            if summary := _ended(self.path):
                lines = _lines(self.path / COMPLETIONS)
                held = f"has {lines} of its {summary.get('requests')} responses in {COMPLETIONS}"
            raise OutputError(
                f"{self.path} {held} and no journal to go on with; replace them with --overwrite, or name"
                " another directory"
            )
        if journal:
            raise OutputError(
                f"{self.path} holds a run that has not finished; go on with it with --resume, replace it with"
                " --overwrite, or name another directory"
            )
        if earlier:
            raise OutputError(
                f"{self.path} already holds {', '.join(earlier)}; name another directory, or replace"
                " them with --overwrite"
            )

    def _refuse_narrow(self, needed: int) -> None:
        free = shutil.disk_usage(self.path).free
        if free < needed:
            raise OutputError(
                f"{self.path} has {free:,} bytes free; {needed // BYTES_PER_REQUEST:,} requests need at least"
                f" {needed:,}. Free some space or name another directory"
            )

    def _remove_hidden(self) -> None:
        """Remove files that a process left, because it was killed before it began."""
        for name in RUN_FILES:
            stem, _, suffix = name.rpartition(".")
            for path in self.path.glob(f".{stem}.????????.{suffix}"):
                path.unlink(missing_ok=True)

    def _remove_made(self) -> None:
        """Remove the directories that were made for it, as far as they are empty."""
        for directory in self._made:
            with contextlib.suppress(OSError):
                directory.rmdir()

    def _write(self, completion: Completion) -> None:
        try:
            self._completions.write(msgspec.json.encode(completion, enc_hook=list))
        except OSError as error:
            raise unwritable(self._completions.path, error) from error


def _ended(path: Path) -> dict[str, Any] | None:
    """Return the summary of a directory's run if that ended by itself."""
    try:
        summary = msgspec.json.decode((path / "summary.json").read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return summary if summary.get("ended") == "finished" else None


def _lines(path: Path) -> int:
    """Return how many whole lines a file has; none if it cannot be read."""
    count = 0
    try:
        with path.open("rb") as file:
            while part := file.read(1 << 20):
                count += part.count(b"\n")
    except OSError:
        return 0
    return count
