"""Child processes: one way to start them, to watch them, and to end them with all that they have started."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO

__all__ = ["ChildProcess", "ProcessGroup", "lead_group", "log_tail"]

KILL_GRACE_S = 3.0
LOG_TAIL_BYTES = 4096

_alive_ends: set[int] = set()
"""Write ends of the pipes by which children notice that this process has died."""


class ProcessGroup(ABC):
    """A process that leads a group of its own; the group dies with this process, SIGKILL included.

    On Linux the leader holds the read end of a pipe, and the kernel sends its group SIGKILL when the write
    end, ``alive``, closes.  That works while the leader is stuck in C code, reaches the processes that it has
    started, and does not depend on the thread that started it, as ``PR_SET_PDEATHSIG`` does.  On other
    systems a child must notice the end of its own connection.
    """

    def __init__(self, pid: int, alive: int) -> None:
        self.pid = pid
        """The process id, which is also that of the group."""
        self._ending = threading.Lock()
        self._alive = alive
        _alive_ends.add(alive)

    @abstractmethod
    def wait(self, timeout_s: float | None = None) -> int | None:
        """Return the exit status, negative for a signal, or None after ``timeout_s``."""

    @abstractmethod
    def _release(self) -> None:
        """Let go of the process and its id, after the last signal."""

    def kill(self) -> None:
        """Send SIGKILL to the group, from any thread; ``end`` must follow, and after it nothing is sent."""
        with self._ending:
            if self._alive >= 0:
                self._signal(signal.SIGKILL)

    def end(self, grace_s: float = 0.0) -> str:
        """Wait ``grace_s``, terminate, wait, kill, and kill what is left of the group; return ``reason()``.

        Bounded by ``grace_s`` and twice ``KILL_GRACE_S``.  Threads may call it at once, and again.
        """
        for wait_s, then in (
            (grace_s, signal.SIGTERM),
            (KILL_GRACE_S, signal.SIGKILL),
            (KILL_GRACE_S, signal.SIGKILL),
        ):
            if self.wait(wait_s) is not None:
                break
            self._signal(then)
        with self._ending:
            if self._alive >= 0:
                self._signal(signal.SIGKILL)
                _alive_ends.discard(self._alive)
                os.close(self._alive)
                self._alive = -1
                self._release()
        return self.reason()

    def reason(self) -> str:
        """Describe in a clause how the process ended."""
        status = self.wait(0.0)
        if status is None:
            return "not reacting to SIGKILL" if self._alive < 0 else "still running"
        if status < 0:
            return f"killed by {signal.Signals(-status).name}"
        return f"exited with status {status}"

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):  # macOS refuses a group of zombies
            os.killpg(self.pid, number)


class ChildProcess(ProcessGroup):
    """A ``ProcessGroup`` whose leader is a child of this process, and runs a command."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        log: IO[bytes] | None = None,
        pipes: bool = False,
        pass_fds: Sequence[int] = (),
    ) -> None:
        """Start ``command`` with this environment, or with that of this process.

        Output goes to ``log``, or where that of this process goes.  With ``pipes``, ``stdin`` and ``stdout``
        are unbuffered pipes; else standard input is empty.

        Raises:
            OSError: it cannot be started.
        """
        held, alive = os.pipe()
        try:
            self._process = subprocess.Popen(
                command,
                bufsize=0,
                stdin=subprocess.PIPE if pipes else subprocess.DEVNULL,
                stdout=subprocess.PIPE if pipes else log,
                stderr=log,
                env=environment,
                pass_fds=(held, *pass_fds),
                start_new_session=True,
            )
            super().__init__(self._process.pid, alive)
            with suppress(ProcessLookupError):  # it has ended already
                _kill_on_close(held, self._process.pid)
        except BaseException:
            _alive_ends.discard(alive)
            os.close(alive)
            raise
        finally:
            os.close(held)

    @property
    def stdin(self) -> IO[bytes]:
        """The pipe to its standard input."""
        assert self._process.stdin is not None
        return self._process.stdin

    @property
    def stdout(self) -> IO[bytes]:
        """The pipe from its standard output."""
        assert self._process.stdout is not None
        return self._process.stdout

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Return the exit status, negative for a signal, or None after ``timeout_s``."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def wait_unreaped(self) -> None:
        """Wait for its end and keep its process id from being given to another process until ``end``."""
        with suppress(ChildProcessError):  # it has been reaped
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)

    def _release(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


def log_tail(log: IO[bytes], start: int = 0) -> list[str]:
    """Return the last lines, ``LOG_TAIL_BYTES`` at most, of what a log holds from ``start`` on.

    Its position is left alone: the child writes at it.
    """
    end = os.fstat(log.fileno()).st_size
    start = max(start, end - LOG_TAIL_BYTES)
    return os.pread(log.fileno(), max(0, end - start), start).decode(errors="replace").splitlines()


def _kill_on_close(pipe: int, group: int) -> None:
    """Have the kernel send a process group SIGKILL once the other end of a held pipe closes; Linux only."""
    if sys.platform == "linux":
        fcntl.fcntl(pipe, fcntl.F_SETOWN, -group)
        fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(pipe, fcntl.F_SETFL, os.O_ASYNC)


def lead_group(pipe: int) -> bool:
    """Lead a group of its own that ends when the pipe's other end closes; return whether that is open."""
    os.setsid()
    _kill_on_close(pipe, os.getpid())
    return not select.select([pipe], [], [], 0)[0]


def _close_alive_ends() -> None:
    for end in _alive_ends:
        os.close(end)
    _alive_ends.clear()


os.register_at_fork(after_in_child=_close_alive_ends)  # a fork that outlives this process must not hold them
