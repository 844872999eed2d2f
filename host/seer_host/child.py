"""A worker as a child process of the runtime: ``python -P -m seer_host.child FD PARENT_PID``."""

from __future__ import annotations

import os
import signal
import socket
import sys

from seer_core.process import die_with
from seer_host.worker import work

__all__ = ["main"]

EXIT_GRACE_S = 10


def main(fd: int, parent_pid: int) -> int:
    """Serve the runtime at the other end of ``fd``; return the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with(parent_pid)
    return work(socket.socket(fileno=fd), lambda: signal.alarm(EXIT_GRACE_S))


if __name__ == "__main__":
    status = main(int(sys.argv[1]), int(sys.argv[2]))
    sys.stdout.flush()
    os._exit(status)  # the interpreter would tear down torch and the engine object by object, for seconds
