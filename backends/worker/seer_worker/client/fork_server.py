"""The fork servers of this process, and the workers that they have forked."""

from __future__ import annotations

import asyncio
import atexit
import os
import re
import resource
import select
import socket
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from seer_host.frames import Frames, WireError, encode
from seer_host.process import ChildProcess, ProcessGroup, log_tail

from seer_worker.fork_wire import Exited, Fork, Forked, ForkFailed, FromServer, Unfit

__all__ = ["ForkRefusedError", "ForkServer", "ForkedProcess", "end_all", "fork", "servers", "why_not_here"]

MODULE = "seer_worker.process.fork_server"
FOUND_ANEW = frozenset(
    {
        *("CUDA_VISIBLE_DEVICES", "TMPDIR", "TEMP", "TMP"),
        *("PWD", "OLDPWD", "SHLVL", "_", "COLUMNS", "LINES", "PYTEST_CURRENT_TEST"),
    }
)
"""Variables that an engine reads when it is made, and not when it is imported, or never."""
MOST_SERVERS = 3
"""Of more than so many, those without a worker are ended."""
STATUS_S = 1.0
"""How long the exit status of a worker that has ended may take."""
UNKNOWN_STATUS = 255

_servers: list[ForkServer] = []
"""The servers of this process, the last used one at the end."""
_choosing = threading.Lock()
"""Held while a server is chosen, or made: threads of this process may fork at the same time."""


class ForkRefusedError(Exception):
    """A worker cannot be forked, and has to be started as a process of its own; the text is a clause."""

    def __init__(self, reason: str, for_path: bool = False) -> None:
        super().__init__(reason)
        self.for_path = for_path


class ForkedProcess(ProcessGroup):
    """A ``ProcessGroup`` whose leader a fork server has forked.

    The server has its exit status, and keeps its process id until ``end``; after the death of the server the
    status is not to be had.
    """

    def __init__(self, pid: int, alive: int, handle: socket.socket, frames: Frames[FromServer]) -> None:
        """Watch a process; ``handle`` and ``alive`` are closed with it.

        Raises:
            OSError: this process may open no more files.
        """
        self._pidfd = os.pidfd_open(pid)
        super().__init__(pid, alive)
        self._handle, self._frames = handle, frames
        self._reading = threading.Lock()
        self._status: int | None = None

    @property
    def ended(self) -> bool:
        """Whether ``end`` has come to its end."""
        return self._alive < 0

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Return the exit status, negative for a signal, or None after ``timeout_s``."""
        with self._reading:
            status, pidfd = self._status, self._pidfd
        if status is None and pidfd >= 0:
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            if not poll.poll(None if timeout_s is None else timeout_s * 1000):
                return None
            with self._reading:
                if self._status is None:
                    self._status = self._read_status()
                status = self._status
        return status

    def reason(self) -> str:
        """Describe in a clause how the process ended."""
        if self.wait(0.0) == UNKNOWN_STATUS:
            return "ended, and so has its fork server, which had the exit status"
        return super().reason()

    def _read_status(self) -> int:
        self._handle.settimeout(STATUS_S)
        data = b""  # it may have come with the answer to the request
        with suppress(OSError, WireError):
            while True:
                for message in self._frames.feed(data):
                    if isinstance(message, Exited):
                        return message.status
                if not (data := self._handle.recv(1 << 10)):
                    break
        return UNKNOWN_STATUS

    def _release(self) -> None:
        """Have the server reap it, and wait until it has."""
        with self._reading:
            os.close(self._pidfd)
            self._pidfd = -1
            self._handle.settimeout(STATUS_S)
            with self._handle, suppress(OSError):  # the server is gone, or the process does not react
                self._handle.shutdown(socket.SHUT_WR)
                while self._handle.recv(1 << 10):
                    pass


class ForkServer:
    """A process that has imported an engine, or is about to, for workers with its ``environment``."""

    def __init__(self, interpreter: str, preload: str, environment: Mapping[str, str]) -> None:
        """Start it; ``preload`` is the import path of the function that imports the engine.

        Raises:
            OSError: the interpreter cannot be run.
        """
        self.interpreter, self.preload, self.environment = interpreter, preload, dict(environment)
        self.owner = os.getpid()
        self.has_served = False
        """Whether it has forked a worker."""
        self._workers: list[ForkedProcess] = []
        self._waiting: set[str] = set()
        with ExitStack() as undo:
            self._log = undo.enter_context(tempfile.TemporaryFile())
            self._control, theirs = socket.socketpair()
            undo.enter_context(self._control)
            with theirs:
                self._process = ChildProcess(
                    (interpreter, "-P", "-m", MODULE, str(theirs.fileno()), preload),
                    environment=environment,
                    log=self._log,
                    pass_fds=[theirs.fileno()],
                )
            undo.pop_all()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process lives."""
        return self._process.wait(0.0) is None

    @property
    def idle(self) -> bool:
        """Whether no worker of it runs, and none is about to."""
        self._workers = [worker for worker in self._workers if not worker.ended]
        return not self._workers and not self._waiting

    def suits(self, interpreter: str, preload: str, environment: Mapping[str, str]) -> bool:
        """Return whether it could fork such a worker; it decides itself on another PYTHONPATH."""
        return (
            self.owner == os.getpid()
            and (self.interpreter, self.preload) == (interpreter, preload)
            and _read_at_import(self.environment) == _read_at_import(environment)
        )

    async def fork(
        self, name: str, environment: Mapping[str, str], connection: socket.socket, log: int
    ) -> ForkedProcess:
        """Fork a worker at the other end of ``connection``, as soon as the engine is imported.

        Raises:
            ForkRefusedError: it must be started in another way, or the server has ended.
            OSError: the machine lacks what a process takes.
        """
        self._waiting.add(name)
        try:
            with ExitStack() as undo:
                handle, theirs = socket.socketpair()
                undo.callback(handle.close)
                with theirs, ExitStack() as sent:
                    held, alive = os.pipe()
                    undo.callback(os.close, alive)
                    sent.callback(os.close, held)
                    here = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
                    sent.callback(os.close, here)
                    fds = [theirs.fileno(), connection.fileno(), held, log, here]
                    with suppress(OSError):  # a dead server closes ``theirs``, which a read shows
                        socket.send_fds(self._control, [b"."], fds)
                frames: Frames[FromServer] = Frames(FromServer)
                answer = await _ask(handle, _request(name, environment), frames)
                match answer:
                    case Forked(pid):
                        worker = ForkedProcess(pid, alive, handle, frames)
                    case Unfit(reason, for_path):
                        raise ForkRefusedError(reason, for_path)
                    case ForkFailed(number):
                        raise OSError(number, os.strerror(number))
                    case _:
                        raise ForkRefusedError(await asyncio.to_thread(self._last_words))
                undo.pop_all()
            self.has_served = True
            self._workers.append(worker)
            return worker
        finally:
            self._waiting.discard(name)

    def close(self) -> None:
        """End the process; workers without an end to come are killed."""
        self._process.kill()
        self._process.end()
        self._control.close()
        self._log.close()

    def _last_words(self) -> str:
        """Return how the server has ended, and the last line that it wrote."""
        if self._process.wait(STATUS_S) is None:
            return "the fork server gave no answer"
        last = next((line.strip() for line in reversed(log_tail(self._log)) if line.strip()), "")
        return f"the fork server {self._process.reason()}{last and f'; it wrote: {last}'}"


async def _ask(handle: socket.socket, request: Fork, frames: Frames[FromServer]) -> FromServer | None:
    """Return the server's answer, None if it ends without one."""
    loop = asyncio.get_running_loop()
    handle.setblocking(False)
    with suppress(OSError, WireError):
        await loop.sock_sendall(handle, encode(request))
        while data := await loop.sock_recv(handle, 1 << 10):
            for message in frames.feed(data):
                return message
    return None


def _request(name: str, environment: Mapping[str, str]) -> Fork:
    status = Path("/proc/self/status").read_text("ascii", "replace")
    umask = re.search(r"^Umask:\s*([0-7]+)$", status, re.MULTILINE)
    limits = {
        number: resource.getrlimit(number)
        for limit, number in vars(resource).items()
        if limit.startswith("RLIMIT_")
    }
    return Fork(
        name,
        dict(environment),
        int(umask[1], 8) if umask else 0o22,
        limits,
        sorted(os.sched_getaffinity(0)),
    )


def _read_at_import(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value for name, value in environment.items() if name not in FOUND_ANEW and name != "PYTHONPATH"
    }


def why_not_here() -> str | None:
    """Return why this machine has no fork servers, None if it has."""
    if not hasattr(os, "pidfd_open"):
        return "only Linux has what forked workers need"
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        return f"this kernel has no pidfd_open: {error.strerror}"
    return None


async def fork(
    interpreter: str,
    preload: str,
    name: str,
    environment: Mapping[str, str],
    connection: socket.socket,
    log: int,
) -> ForkedProcess:
    """Fork a worker, by a server that is there, or by a new one.

    Raises:
        ForkRefusedError: it must be started in another way.
        OSError: the machine lacks what a process takes, or the interpreter cannot be run.
    """
    reason = why_not_here()
    if reason is not None:
        raise ForkRefusedError(reason)
    refused: list[ForkServer] = []
    while True:
        server = _suitable(interpreter, preload, environment, refused)
        try:
            return await server.fork(name, environment, connection, log)
        except ForkRefusedError as refusal:
            if not refusal.for_path:
                if server.has_served and not server.alive:
                    _end(server)  # the next start makes another; one that failed to import stays, and refuses
                raise
            refused.append(server)


def _suitable(
    interpreter: str, preload: str, environment: Mapping[str, str], refused: Sequence[ForkServer]
) -> ForkServer:
    """Return a server that could fork the worker, best one with its PYTHONPATH; it is made if need be."""
    path = environment.get("PYTHONPATH", "")
    with _choosing:
        found = [
            server
            for server in _servers
            if server not in refused and server.suits(interpreter, preload, environment)
        ]
        if found:
            server = min(found, key=lambda server: server.environment.get("PYTHONPATH", "") != path)
            _servers.remove(server)
        else:
            _end_unused()
            server = ForkServer(interpreter, preload, environment)
        _servers.append(server)
        return server


def _end_unused() -> None:
    """Make room for another server: end those that have no worker, the longest unused one first."""
    for server in list(_servers):
        if server.owner != os.getpid():
            _servers.remove(server)  # this process is a fork of the one that has it
        elif len(_servers) >= MOST_SERVERS and server.idle:
            _end(server)


def _end(server: ForkServer) -> None:
    with suppress(ValueError):  # another thread has done it
        _servers.remove(server)
        server.close()


def servers() -> list[ForkServer]:
    """Return the fork servers of this process."""
    return [server for server in _servers if server.owner == os.getpid()]


@atexit.register
def end_all() -> None:
    """End the fork servers of this process; workers that run then go on without."""
    for server in servers():
        _end(server)
