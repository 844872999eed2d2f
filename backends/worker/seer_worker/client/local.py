"""Workers on this machine, each on one end of a socket pair: forked, or child processes of the runtime."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import BinaryIO

import structlog
from seer_host.json_files import describe_flaw
from seer_host.process import ChildProcess, ProcessGroup
from seer_host.scratch import Scratch

from seer_core.errors import EngineError
from seer_core.ports.kv import LOOPBACK
from seer_core.ports.weights import WeightSpec
from seer_worker.client.fork_server import ForkRefusedError, fork
from seer_worker.client.worker_log import WorkerLog
from seer_worker.wire import Channel, Shutdown

__all__ = ["LocalLauncher", "LocalWorker"]

log_events = structlog.get_logger("seer")


class LocalLauncher:
    """Starts child processes of this one, or has a fork server fork them.

    ``preload`` is the import path of a function without arguments that imports the engine, for a fork server.
    """

    def __init__(self, preload: str | None = None) -> None:
        self._preload = preload

    async def address(self) -> str:
        """Return the address of loopback: all workers are on this machine."""
        return LOOPBACK

    async def find_place(self, name: str, waiting: Callable[[str], None]) -> None:
        """Return: there is always a place here."""

    async def launch(
        self, name: str, interpreter: str, environment: Mapping[str, str], log: Path, keep_log: bool
    ) -> LocalWorker:
        """Start a worker in a process group of its own."""
        worker_log = WorkerLog(log, keep_log)
        file = worker_log.open()
        ours, theirs = socket.socketpair()
        with ExitStack() as undo:
            undo.callback(worker_log.discard_empty)
            undo.callback(ours.close)
            try:
                with theirs, file:
                    scratch = Scratch("seer-worker-")
                    undo.callback(scratch.close)
                    process, reason = await self._start(name, interpreter, environment, theirs, file)
            except OSError as error:
                raise EngineError(_launch_flaw(error, interpreter)) from error
            undo.pop_all()
        if reason is None:
            log_events.info("worker_forked", instance=name, pid=process.pid)
        else:
            log_events.info("worker_started", instance=name, pid=process.pid, not_forked=reason)
        streams = await asyncio.open_unix_connection(sock=ours)
        return LocalWorker(process, *streams, worker_log, scratch)

    async def _start(
        self,
        name: str,
        interpreter: str,
        environment: Mapping[str, str],
        connection: socket.socket,
        file: BinaryIO,
    ) -> tuple[ProcessGroup, str | None]:
        """Fork the worker, or start it as a process of its own; then the reason for that is returned, too."""
        reason = "the engine has no fork server, or the settings want none"
        if self._preload is not None:
            try:
                log = file.fileno()
                return await fork(interpreter, self._preload, name, environment, connection, log), None
            except ForkRefusedError as refusal:
                reason = str(refusal)
        # -P: nothing is imported from where it runs
        command = (interpreter, "-P", "-m", "seer_worker.process.child", str(connection.fileno()))
        fds = [connection.fileno()]
        return ChildProcess(command, environment=environment, log=file, pass_fds=fds), reason


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
        process: ProcessGroup,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        log: WorkerLog,
        scratch: Scratch,
    ) -> None:
        super().__init__(reader, writer)
        self.pid = process.pid
        """The worker's process id, which is also its process group."""
        self.scratch = str(scratch.path)
        self._scratch = scratch
        self.log = str(log.path)
        self._process = process
        self._log = log

    def bring_weights(self, source: WeightSpec) -> AbstractAsyncContextManager[WeightSpec]:
        """Return what names weights of this machine, where they are."""
        return nullcontext(source)

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
        return self._log.last_words() if self.fatal is None else self._log.place

    def discard_log(self) -> None:
        """Remove the log, and the directory with the last one in it."""
        self._log.discard()
