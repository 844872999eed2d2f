"""A worker as a child process of the runtime: ``python -P -m seer_worker.process.child FD``."""

from __future__ import annotations

import os
import signal
import socket
import sys

import structlog

from seer_worker.process.serving import work

__all__ = ["configure_log", "main", "serve"]

EXIT_GRACE_S = 10


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


def serve(connection: socket.socket) -> int:
    """Serve the runtime at the other end, which this process has to itself; return the exit status."""
    os.register_at_fork(after_in_child=connection.close)  # it ends with this process, not with a fork of it
    return work(connection, lambda: signal.alarm(EXIT_GRACE_S))


def main(fd: int) -> int:
    """Serve the runtime at the other end of ``fd``; return the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    configure_log()
    return serve(socket.socket(fileno=fd))


if __name__ == "__main__":
    status = main(int(sys.argv[1]))
    sys.stdout.flush()
    os._exit(status)  # the interpreter would tear down torch and the engine object by object, for seconds
