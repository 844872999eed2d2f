"""Workers as child processes of the runtime, each on one end of a socket pair."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import attrs

from seer_core.errors import EngineError
from seer_core.json_files import describe_flaw
from seer_core.process import ChildProcess, log_tail
from seer_core.scratch import Scratch
from seer_worker.client.channel import Channel
from seer_worker.wire import Shutdown

__all__ = ["LocalLauncher", "LocalWorker"]

LOG_TAIL_LINES = 15


@attrs.frozen
class LocalLauncher:
    """Starts child processes; each appends what it writes to a file in ``log_dir``.

    Without ``keep_logs`` a log may be discarded once its worker has ended without a failure.
    """

    log_dir: Path
    keep_logs: bool = True

    async def launch(self, name: str, interpreter: str, environment: Mapping[str, str]) -> LocalWorker:
        """Start a worker in a process group of its own."""
        log_path = self.log_dir / f"{name}.log"
        try:
            self.log_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            log = log_path.open("ab")
        except OSError as error:
            raise EngineError(
                f"its log {log_path} cannot be written: {describe_flaw(error)}; correct `log_dir` in its"
                " engine's table, or TMPDIR where that names none"
            ) from error
        ours, theirs = socket.socketpair()
        # -P: nothing is imported from where it runs
        command = (interpreter, "-P", "-m", "seer_worker.process.child", str(theirs.fileno()))
        with ExitStack() as undo:
            undo.callback(ours.close)
            log_start = log.tell()
            try:
                with theirs, log:
                    scratch = Scratch("seer-worker-")
                    undo.callback(scratch.close)
                    process = ChildProcess(
                        command, environment=environment, log=log, pass_fds=[theirs.fileno()]
                    )
            except OSError as error:
                raise EngineError(_launch_flaw(error, interpreter)) from error
            undo.pop_all()
        streams = await asyncio.open_unix_connection(sock=ours)
        return LocalWorker(process, *streams, log_path, log_start, scratch, self.keep_logs)


def _launch_flaw(error: OSError, interpreter: str) -> str:
    """Return why no worker runs, and the remedy: the interpreter is at fault only where it is named."""
    flaw = describe_flaw(error)
    if error.filename == interpreter:
        return f"{interpreter} cannot be run: {flaw}; correct `python` in its engine's table"
    where = f"{error.filename}: " if error.filename else ""
    return f"this machine cannot start a process: {where}{flaw}; free what it lacks, then run again"


class LocalWorker(Channel):
    """A ``RunningWorker`` in a child process, which leads a process group of its own."""

    def __init__(
        self,
        process: ChildProcess,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        log_path: Path,
        log_start: int,
        scratch: Scratch,
        keep_log: bool,
    ) -> None:
        super().__init__(reader, writer)
        self.pid = process.pid
        """The worker's process id, which is also its process group."""
        self.scratch = str(scratch.path)
        self._scratch = scratch
        self.log = str(log_path)
        self._process = process
        self._log_path, self._log_start, self._keep_log = log_path, log_start, keep_log

    async def end(self, grace_s: float = 0.0) -> str:
        """Ask, wait ``grace_s``, terminate, wait, kill."""
        if grace_s > 0:
            self.send(Shutdown())
        thread = ThreadPoolExecutor(1, "seer-worker-end")  # of its own: all workers end at the same time
        ended = asyncio.wrap_future(thread.submit(self._process.end, grace_s))
        thread.shutdown(wait=False)
        reason = await ended
        self.close()
        self._scratch.close()
        return reason if self.fatal is None else self.fatal

    def last_words(self) -> str:
        """Return the last lines of its log, unless the worker has sent the reason of its end."""
        if self.fatal is not None:
            return f"its log is {self._log_path}"
        try:
            with self._log_path.open("rb") as log:
                lines = log_tail(log, self._log_start)
        except OSError as error:  # deleted, or its directory is
            return f"its log {self._log_path} cannot be read: {error.strerror}"
        return "\n".join([f"the last lines of {self._log_path}:", *lines[-LOG_TAIL_LINES:]])

    def discard_log(self) -> None:
        """Remove the log, and the directory with the last one in it."""
        if not self._keep_log:
            self._log_path.unlink(missing_ok=True)
            with suppress(OSError):  # another instance's log is still there
                self._log_path.parent.rmdir()
