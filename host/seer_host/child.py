"""A worker as a child process of the runtime: ``python -P -m seer_host.child FD PARENT_PID``."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys

import structlog

from seer_host.worker import work

__all__ = ["main"]

EXIT_GRACE_S = 10
PR_SET_PDEATHSIG = 1
"""Linux, prctl(2)."""


def configure_log() -> None:
    """Write log records to standard error, a line each and tracebacks below: so they stand in the log."""
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%H:%M:%S"),
            structlog.dev.ConsoleRenderer(
                colors=False, pad_event_to=0, exception_formatter=structlog.dev.plain_traceback
            ),
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def die_with(parent_pid: int) -> None:
    """Ask Linux to kill this process when its parent dies, even by SIGKILL; call it first thing.

    Elsewhere the process must notice by itself.  Exits at once if the parent, ``parent_pid``, is dead.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit("the process that started this one died before it was up")


def main(fd: int, parent_pid: int) -> int:
    """Serve the runtime at the other end of ``fd``; return the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with(parent_pid)
    configure_log()
    return work(socket.socket(fileno=fd), lambda: signal.alarm(EXIT_GRACE_S))


if __name__ == "__main__":
    status = main(int(sys.argv[1]), int(sys.argv[2]))
    sys.stdout.flush()
    os._exit(status)  # the interpreter would tear down torch and the engine object by object, for seconds
