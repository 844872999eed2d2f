"""A process that has imported an engine once, and forks a worker of it in milliseconds.

``python -P -m seer_worker.process.fork_server FD PRELOAD`` calls the function that ``PRELOAD`` names, and
then takes requests by the socket ``FD`` until that closes.  It has one thread and no device, or it forks
nothing.
"""

from __future__ import annotations

import fcntl
import gc
import os
import random
import resource
import select
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any, NoReturn

import attrs
import structlog
from seer_host.frames import Frames, WireError, encode
from seer_host.process import lead_group

from seer_worker.fork_wire import Exited, Fork, Forked, ForkFailed, FromServer, ToServer, Unfit
from seer_worker.process.child import configure_log, serve
from seer_worker.process.compiled import keep_compiled_private
from seer_worker.process.python_path import clash_of, replace_path

__all__ = ["Forker", "main", "set_title", "unfitness"]

log = structlog.get_logger("seer")

DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/")
FDS = 5
"""The descriptors of a request: socket, connection, pipe, log and working directory."""


@attrs.define(eq=False)
class ForkedWorker:
    """A worker, from the runtime's request until the runtime lets go of it."""

    handle: socket.socket
    """The runtime's socket."""
    fds: list[int]
    """Connection, pipe, log and working directory, until they are the worker's."""
    frames: Frames[ToServer] = attrs.field(factory=lambda: Frames[ToServer](ToServer))
    pid: int = 0
    pidfd: int = -1
    """Of a worker that runs."""
    held: bool = True
    """Whether the runtime still has its end of the socket."""

    def send(self, message: FromServer) -> None:
        """Send the runtime a message, if it is still there."""
        with suppress(OSError):
            self.handle.sendall(encode(message))

    def close_fds(self) -> None:
        """Close what is the worker's."""
        while self.fds:
            os.close(self.fds.pop())


class Forker:
    """Forks a worker for each request that comes by ``control``."""

    def __init__(self, control: socket.socket, facts: dict[str, str], changed: Mapping[str, str]) -> None:
        """Take requests by ``control``; ``changed`` are variables that the import of the engine has set."""
        self._control = control
        self._facts = facts
        self._changed = changed
        self._poll = select.poll()
        self._by_fd: dict[int, Callable[[], object]] = {}
        self._requests: set[ForkedWorker] = set()
        self._watch(control.fileno(), self._accept)

    def serve(self) -> None:
        """Serve until the runtime closes the socket; then kill all workers."""
        while self._control.fileno() in self._by_fd:
            for fd, _ in self._poll.poll():
                if call := self._by_fd.get(fd):  # one before it may have closed it
                    call()
        for request in list(self._requests):
            if request.held:
                self._let_go(request)

    def _watch(self, fd: int, call: Callable[[], object]) -> None:
        self._by_fd[fd] = call
        self._poll.register(fd, select.POLLIN)

    def _forget(self, fd: int) -> None:
        del self._by_fd[fd]
        self._poll.unregister(fd)

    def _accept(self) -> None:
        """Take a request's descriptors; the request itself comes by the first of them."""
        data, fds, *_ = socket.recv_fds(self._control, 1, FDS, socket.MSG_CMSG_CLOEXEC)
        if not data:
            self._forget(self._control.fileno())
        elif len(fds) < FDS:  # this process has no room for them
            for fd in fds:
                os.close(fd)
        else:
            request = ForkedWorker(socket.socket(fileno=fds[0]), fds[1:])
            self._requests.add(request)
            self._watch(fds[0], lambda: self._receive(request))

    def _receive(self, request: ForkedWorker) -> None:
        """Fork once the request is there; let go of the worker when the runtime does."""
        try:
            data = request.handle.recv(1 << 16)
            messages = list(request.frames.feed(data))
        except (OSError, WireError):
            data, messages = b"", []
        if not data:
            self._let_go(request)
        for message in messages:
            self._fork(request, message)

    def _fork(self, request: ForkedWorker, wanted: Fork) -> None:
        """Fork the worker, which reports that it runs, or report why not."""
        try:
            clash = clash_of(wanted.environment.get("PYTHONPATH", ""))
            reason = unfitness() or clash
            if reason is None:
                sys.stdout.flush()
                sys.stderr.flush()
                request.pid = os.fork()
                if request.pid == 0:
                    self._become(request, wanted)
                request.pidfd = os.pidfd_open(request.pid)
        except OSError as error:
            if request.pid:
                os.kill(request.pid, signal.SIGKILL)
                self._reap(request)
            request.send(ForkFailed(error.errno or 0))
        else:
            if reason is None:
                self._watch(request.pidfd, lambda: self._ended(request))
            else:
                request.send(Unfit(reason, for_path=reason == clash))
        request.close_fds()

    def _ended(self, request: ForkedWorker) -> None:
        """Report the exit status of a worker, which is reaped once the runtime has let go of it."""
        result = os.waitid(os.P_PID, request.pid, os.WEXITED | os.WNOWAIT)
        assert result is not None
        status = result.si_status if result.si_code == os.CLD_EXITED else -result.si_status
        self._forget(request.pidfd)
        os.close(request.pidfd)
        request.pidfd = -1
        if request.held:
            request.send(Exited(status))
        else:
            self._reap(request)

    def _let_go(self, request: ForkedWorker) -> None:
        """Kill what still runs of a worker's group; once it has ended, reap it and close the socket."""
        request.held = False
        self._forget(request.handle.fileno())
        request.close_fds()
        if request.pid:
            with suppress(ProcessLookupError):  # it leads no group yet, and will find its pipe closed
                os.killpg(request.pid, signal.SIGKILL)
        if request.pidfd < 0:
            self._reap(request)

    def _reap(self, request: ForkedWorker) -> None:
        if request.pid:
            os.waitpid(request.pid, 0)
            request.pid = 0
        if not request.held:
            self._requests.discard(request)
            request.handle.close()

    def _become(self, request: ForkedWorker, wanted: Fork) -> NoReturn:
        """Be the worker, in the forked process."""
        status = 1
        try:
            connection, pipe, log_fd, directory = request.fds
            if not lead_group(pipe):
                os._exit(status)
            request.send(Forked(os.getpid()))
            for fd in (1, 2):
                os.dup2(log_fd, fd)
            os.fchdir(directory)
            self._close(request, log_fd, directory)
            _take_over(wanted, self._changed)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            log.info("worker_forked", instance=wanted.name, server=os.getppid(), **self._facts)
            status = serve(socket.socket(fileno=connection))
            sys.stdout.flush()
        except BaseException:
            log.exception("worker_failed")
        finally:
            os._exit(status)

    def _close(self, own: ForkedWorker, *fds: int) -> None:
        """Close what is the server's, and the other workers'."""
        for fd in fds:
            os.close(fd)
        for request in self._requests:
            request.handle.close()
            if request is not own:
                request.close_fds()
            if request.pidfd >= 0:
                os.close(request.pidfd)
        self._control.close()
        for fd in _signalling_pipes():
            if fd not in own.fds:
                os.close(fd)


def _signalling_pipes() -> list[int]:
    """Return the descriptors of this process whose ends make the kernel send a signal."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if fcntl.fcntl(int(name), fcntl.F_GETFL) & os.O_ASYNC:
                found.append(int(name))
    return found


def _take_over(wanted: Fork, changed: Mapping[str, str]) -> None:
    """Have what a process started by the runtime would have: variables, limits, and randomness of its own."""
    replace_path(wanted.environment.get("PYTHONPATH", ""))
    os.environ.clear()
    os.environ.update({**wanted.environment, **changed})
    os.umask(wanted.umask)
    for number, limits in wanted.limits.items():
        with suppress(ValueError, OSError):  # the hard limit of this process is lower
            resource.setrlimit(number, limits)
    with suppress(OSError):  # another set of processors is allowed by now
        os.sched_setaffinity(0, wanted.cpus)
    tempfile.tempdir = None
    random.seed()
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()
    set_title(f"seer worker {wanted.name}")
    gc.enable()


def set_title(title: str) -> None:
    """Change what ``ps`` shows, if the library is there; its first call needs the first environment."""
    with suppress(ImportError):
        import_module("setproctitle").setproctitle(title)


def unfitness() -> str | None:
    """Return why no worker can be forked here: a fork has one thread, and no use of the parent's devices."""
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        return f"it has {threads} threads, of which a fork would have one"
    devices = [path for path in _open_paths() if path.startswith(DEVICES)]
    if devices:
        return f"it has {devices[0]} open, which a fork cannot use"
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "it has a CUDA context, which a fork cannot use"
    return None


def _open_paths() -> Sequence[str]:
    paths = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            paths.append(os.readlink(link))
    return paths


def main(fd: int, preload: str) -> int:
    """Import the engine, and serve the runtime at the other end of ``fd``; return the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    configure_log()
    set_title(f"seer fork server {preload}")
    gc.disable()  # nothing of an import is garbage, and a collection in a worker would copy all pages
    begun_s, before = perf_counter(), dict(os.environ)
    keep_compiled_private()
    module, _, name = preload.partition(":")
    getattr(import_module(module), name)()
    facts = {"imported": preload, "import_s": f"{perf_counter() - begun_s:.1f}"}
    gc.collect()
    gc.freeze()
    changed = {name: value for name, value in os.environ.items() if before.get(name) != value}
    Forker(socket.socket(fileno=fd), facts, changed).serve()
    return 0


if __name__ == "__main__":
    os._exit(main(int(sys.argv[1]), sys.argv[2]))
