"""A worker process and the socket to it, as the runtime's event loop sees them."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from seer_host.wire import Fatal, Frames, FromWorker, Shutdown, ToWorker, encode

__all__ = ["WorkerProcess"]

KILL_GRACE_S = 3.0
LOG_TAIL_BYTES = 4096
LOG_TAIL_LINES = 15


class WorkerProcess:
    """One ``seer_host.worker`` in a process group of its own, on one end of a socket pair."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        log_path: Path,
        log_start: int,
        scratch: Path,
    ) -> None:
        self.scratch = scratch
        """A directory of the worker's own, gone with it."""
        self.received_bytes = 0
        self._process = process
        self._reader = reader
        self._writer = writer
        self._log_path, self._log_start = log_path, log_start
        self._loop = asyncio.get_running_loop()
        self._frames: Frames[FromWorker] = Frames(FromWorker)
        self._outbox: list[bytes] = []
        self._fatal: str | None = None

    @classmethod
    async def spawn(cls, interpreter: str, environment: Mapping[str, str], log_path: Path) -> WorkerProcess:
        """Start a worker under this interpreter; its output is appended to ``log_path``."""
        ours, theirs = socket.socketpair()
        arguments = ("seer_host.worker", str(theirs.fileno()), str(os.getpid()))
        with theirs, log_path.open("ab") as log:
            log_start = log.tell()
            process = await asyncio.create_subprocess_exec(
                *(interpreter, "-P", "-m", *arguments),  # -P: nothing is imported from where it runs
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(environment),
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        scratch = Path(tempfile.mkdtemp(prefix="seer-worker-"))
        return cls(process, reader, writer, log_path, log_start, scratch)

    @property
    def pid(self) -> int:
        """The worker's process id, which is also its process group."""
        return self._process.pid

    def send(self, message: ToWorker) -> None:
        """Send a message at the end of this turn of the event loop, all of one turn together."""
        if not self._outbox:
            self._loop.call_soon(self._flush)
        self._outbox.append(encode(message))

    async def receive(self) -> list[FromWorker]:
        """Wait for the next messages; ``Fatal`` is kept for ``reason``.

        Raises:
            EOFError: the worker is gone.
            WireError: it sent something that is no message.
        """
        while True:
            try:
                data = await self._reader.read(1 << 20)
            except ConnectionError as error:
                raise EOFError from error
            if not data:
                raise EOFError
            self.received_bytes += len(data)
            messages = list(self._frames.feed(data))
            for message in messages:
                if isinstance(message, Fatal):
                    self._fatal = message.reason
            if messages:
                return messages

    async def end(self, grace_s: float = 0.0) -> str:
        """End the worker and whatever it started; return how it ended.

        Ask, wait ``grace_s``, terminate, wait, kill.  Safe on a process already dead.
        """
        if grace_s > 0:
            self.send(Shutdown())
        for wait_s, then in (
            (grace_s, signal.SIGTERM),
            (KILL_GRACE_S, signal.SIGKILL),
            (KILL_GRACE_S, signal.SIGKILL),
        ):
            try:
                async with asyncio.timeout(wait_s):
                    await self._process.wait()
                break
            except TimeoutError:
                self._signal(then)
        self._signal(signal.SIGKILL)
        self._writer.close()
        shutil.rmtree(self.scratch, ignore_errors=True)
        return self._reason()

    def last_words(self) -> str:
        """Return the last lines of its log, unless the worker said itself what was wrong."""
        if self._fatal is not None:
            return f"its log is {self._log_path}"
        with self._log_path.open("rb") as log:
            log.seek(max(self._log_start, log.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
        return "\n".join([f"the last lines of {self._log_path}:", *lines[-LOG_TAIL_LINES:]])

    def _flush(self) -> None:
        self._writer.write(b"".join(self._outbox))
        self._outbox.clear()

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def _reason(self) -> str:
        if self._fatal is not None:
            return self._fatal
        status = self._process.returncode
        if status is None:
            return "not reacting to SIGKILL"
        if status < 0:
            return f"killed by {signal.Signals(-status).name}"
        return f"exited with status {status}"
