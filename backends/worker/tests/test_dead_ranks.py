"""The end of a worker that has not come to notice a dead rank: the runtime gets the reason."""

import socket
import subprocess
import sys

from seer_host.frames import Frames
from seer_worker.wire import Fatal, FromWorker

WORKER = """
import socket, sys
from seer_worker.process import dead_ranks
from seer_worker.wire import Link

dead_ranks.GRACE_S = 0.0
dead_ranks.send_reason_by(Link(socket.socket(fileno=int(sys.argv[1]))).send_last)
dead_ranks.end_after_grace("one of its 2 ranks has ended", lambda: len(sys.argv) > 2)
"""


def end(*closing):
    """Return the exit status of such a worker, and what it sent."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [sys.executable, "-c", WORKER, str(theirs.fileno()), *closing]
        status = subprocess.run(command, pass_fds=[theirs.fileno()]).returncode
        theirs.close()
        return status, list(Frames(FromWorker).feed(ours.recv(1 << 16)))


def test_the_runtime_gets_the_reason_of_an_end_that_the_worker_has_not_noticed():
    assert end() == (1, [Fatal("one of its 2 ranks has ended")])


def test_a_worker_that_is_closing_ends_by_itself():
    assert end("closing") == (0, [])
