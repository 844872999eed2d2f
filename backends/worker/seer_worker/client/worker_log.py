"""The file on the runtime's machine with what a worker has written, wherever it runs."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from seer_host.json_files import describe_flaw
from seer_host.process import log_tail

from seer_core.errors import EngineError

__all__ = ["WorkerLog"]

LOG_TAIL_LINES = 15
TO_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC


class WorkerLog:
    """A log at ``path``; without ``keep`` it may be discarded once its worker has ended without a failure."""

    def __init__(self, path: Path, keep: bool) -> None:
        self.path = path
        self._keep = keep
        self._start = 0

    @property
    def place(self) -> str:
        """A clause with the path."""
        return f"its log is {self.path}"

    def open(self) -> BinaryIO:
        """Open it to append what this worker writes, unbuffered.

        Raises:
            EngineError: it cannot be written.
        """
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            file = os.fdopen(os.open(self.path, TO_APPEND, 0o600), "ab", buffering=0)
        except OSError as error:
            raise EngineError(
                f"its log {self.path} cannot be written: {describe_flaw(error)}; correct `log_dir` in its"
                " engine's table, or TMPDIR where that names none"
            ) from error
        self._start = file.tell()
        return file

    def last_words(self) -> str:
        """Return the last lines that this worker has written, and where all of them are."""
        try:
            with self.path.open("rb") as log:
                lines = log_tail(log, self._start)
        except OSError as error:  # deleted, or its directory is
            return f"its log {self.path} cannot be read: {error.strerror}"
        return "\n".join([f"the last lines of {self.path}:", *lines[-LOG_TAIL_LINES:]])

    def discard_empty(self) -> None:
        """Discard the file of a worker that has not started, unless it holds what an earlier one wrote."""
        if self.path.exists() and not self.path.stat().st_size:
            self.discard()

    def discard(self) -> None:
        """Remove the file unless it is to be kept, and the directory with the last one in it."""
        if not self._keep:
            self.path.unlink(missing_ok=True)
            with suppress(OSError):  # another instance's log is still there
                self.path.parent.rmdir()
