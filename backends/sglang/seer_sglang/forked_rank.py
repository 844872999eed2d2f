"""A rank that this process forks, with all that it has imported."""

from __future__ import annotations

import os
import select
import socket
import stat
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NoReturn

import structlog
from seer_host.process import ProcessGroup, lead_group
from seer_worker.process.fork_server import set_title, unfitness

__all__ = ["ForkedRank", "can_fork"]

log = structlog.get_logger("seer")

READY = b"."


def can_fork() -> bool:
    """Return whether a fork of this process is sound: it has one thread, and uses no device."""
    return hasattr(os, "pidfd_open") and unfitness() is None


class ForkedRank(ProcessGroup):
    """A ``ProcessGroup`` whose leader is a fork of this process."""

    def __init__(self, name: str, main: Callable[[int], object], here: socket.socket, fd: int) -> None:
        """Fork; the child runs ``main`` with ``fd``, the other end of ``here``.

        Raises:
            OSError: the machine lacks what a process takes.
        """
        sys.stdout.flush()
        sys.stderr.flush()
        self._reaping = threading.Lock()
        self._status: int | None = None
        held, alive = os.pipe()
        try:
            pid = os.fork()
            if pid == 0:
                os.close(alive)
                _become(name, main, held, fd)
            super().__init__(pid, alive)
        except BaseException:
            os.close(alive)
            raise
        finally:
            os.close(held)
        self._pidfd = os.pidfd_open(pid)
        _wait_for((here.fileno(), self._pidfd))  # by then it leads its group, or has ended
        with suppress(BlockingIOError):
            here.recv(len(READY), socket.MSG_DONTWAIT)

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Return the exit status, negative for a signal, or None after ``timeout_s``."""
        with self._reaping:
            status, pidfd = self._status, self._pidfd
        if status is None and pidfd >= 0 and _wait_for([pidfd], timeout_s):
            with self._reaping:
                if self._status is None:
                    self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
                status = self._status
        return status

    def wait_unreaped(self) -> None:
        """Wait for its end and keep its process id from being given to another process until ``end``."""
        with suppress(ChildProcessError):  # it has been reaped
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)

    def _release(self) -> None:
        with self._reaping:
            os.close(self._pidfd)
            self._pidfd = -1


def _wait_for(fds: Sequence[int], timeout_s: float | None = None) -> bool:
    """Return whether one of these became readable in time."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))


def _become(name: str, main: Callable[[int], object], pipe: int, fd: int) -> NoReturn:
    """Be the rank, in the forked process, until rank 0 is gone."""
    status = 1
    try:
        if lead_group(pipe):
            _let_go_of_all_but(pipe, fd)
            set_title(name)
            os.write(fd, READY)
            main(fd)
            status = 0
    except EOFError:
        status = 0
    except BaseException:
        log.exception("rank_failed")
    finally:
        os._exit(status)


def _let_go_of_all_but(*kept: int) -> None:
    """Close the sockets and pipes of rank 0; their numbers stay taken, for their objects are here, too."""
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        with suppress(OSError):
            mode = os.fstat(number).st_mode
            if number > 2 and number not in kept and (stat.S_ISSOCK(mode) or stat.S_ISFIFO(mode)):
                os.dup2(nothing, number, inheritable=False)
    os.close(nothing)
