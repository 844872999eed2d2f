"""Processes that compute together: started, all asked at once, watched while they answer, and ended.

A rank that dies leaves the others waiting for it, and so does one that hangs.  So whoever asks waits only as
long as some rank gets on, and ends them all when one is lost.  One that dies while nobody asks is told of.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import IO, Any

import attrs

from seer_rl.errors import TrainError

__all__ = ["ALIVE", "Broke", "Done", "Raised", "Ranks"]

ALIVE = None
"""What a rank says when it has got a step further."""

GRACE_S = 5.0
"""How long the others may take to answer, or to die, after one has failed: so that the cause is told."""


@attrs.frozen
class Done:
    """A rank's answer."""

    value: Any


@attrs.frozen
class Raised:
    """A rank refused or could not do what was asked, and goes on."""

    error: Exception


@attrs.frozen
class Broke:
    """A rank failed of something that nobody thought of, or because another rank did."""

    text: str


class _Lost:
    """A rank is dead."""


Answer = Done | Raised | Broke | _Lost | None


class Ranks:
    """As many processes of one module, which ``seer_rl.megatron_rank`` shows; asked by one thread at a time.

    Each is run as ``python -m MODULE RANK ALIVE CONNECTION PORT LISTENER``: descriptors of a pipe that closes
    when this process is dead and of a connection, a port on the loopback where the ranks meet, and, in
    rank 0, the descriptor of the socket that listens there (elsewhere -1).
    """

    def __init__(self, module: str, count: int, environment: Mapping[str, str], timeout_s: float) -> None:
        """Start them."""
        self._timeout_s = timeout_s
        self._ranks: list[_Rank] = []
        self._watchers: list[threading.Thread] = []
        self._senders = ThreadPoolExecutor(count, "seer-rank")
        self._closed = False
        self._failure: TrainError | None = None
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            try:
                for number in range(count):
                    file = listener.fileno() if number == 0 else -1
                    command, env = [module, str(number)], {**os.environ, **environment}
                    rank = _Rank(command, port, file, env, timeout_s)
                    self._ranks.append(rank)
            except BaseException:
                self.close()
                raise

    def ask(self, what: str, *arguments: Any) -> list[Any]:
        """Have every rank do something, and return their answers, by rank.

        Raises:
            Exception: what a rank raised; all others have answered, and may be asked again.
            TrainError: a rank is lost or hung; all have been ended.
        """
        if self._closed:
            raise TrainError("the trainer's ranks have ended; go on with --resume")
        # A rank that hangs may not even read: what is sent must not hold this thread up.
        message = pickle.dumps((what, arguments))
        for rank in self._ranks:
            self._senders.submit(_send, rank.connection, message)
        answers, steps = self._answers()
        try:
            return self._judge(answers, steps)
        except BaseException as error:
            if not all(isinstance(answer, Done | Raised) for answer in answers):
                self._failure = error if isinstance(error, TrainError) else None
                self.close()
            raise

    def when_lost(self, tell: Callable[[TrainError], None]) -> None:
        """Have ``tell`` called, in a thread of its own, once a rank is lost or hangs, whoever asks it or not.

        It may be called once for each rank, but for their end by ``close``, which waits for such calls.
        """
        for number in range(len(self._ranks)):
            thread = threading.Thread(target=self._watch, args=[number, tell], name="seer-rank-watch")
            self._watchers.append(thread)
            thread.start()

    def _watch(self, number: int, tell: Callable[[TrainError], None]) -> None:
        with suppress(ChildProcessError):  # it has been waited for
            os.waitid(os.P_PID, self._ranks[number].process.pid, os.WEXITED | os.WNOWAIT)
        if not self._closed:
            tell(self._loss(number))
        elif self._failure is not None:  # another thread asked, and all were ended
            tell(self._failure)

    def _loss(self, number: int) -> TrainError:
        """Return what is said of a rank that is dead."""
        return TrainError(f"rank {number} of the trainer {self._ranks[number].end()}; go on with --resume")

    def _answers(self) -> tuple[list[Answer], list[int]]:
        """Return each rank's answer, None if it hangs, and how many steps it told of."""
        answers: list[Answer] = [None] * len(self._ranks)
        steps = [0] * len(self._ranks)
        pending = {rank.connection: number for number, rank in enumerate(self._ranks)}
        end, failed = time.monotonic() + self._timeout_s, False
        while pending:
            ready = wait(list(pending), max(0.0, end - time.monotonic()))
            if not ready:
                break
            if not failed:
                end = time.monotonic() + self._timeout_s
            for connection in ready:
                assert isinstance(connection, Connection)
                number = pending[connection]
                try:
                    said = connection.recv()
                except BlockingIOError:  # it hangs in the midst of its answer
                    del pending[connection]
                    continue
                except (EOFError, OSError):
                    said = _Lost()
                if said is ALIVE:
                    steps[number] += 1
                    continue
                answers[number] = said
                del pending[connection]
                if not failed and not isinstance(said, Done):
                    end, failed = time.monotonic() + GRACE_S, True
        return answers, steps

    def _judge(self, answers: Sequence[Answer], steps: Sequence[int]) -> list[Any]:
        """Return what the ranks answered, or raise what went wrong first."""
        for number, answer in enumerate(answers):
            if isinstance(answer, _Lost):
                raise self._loss(number)
        for answer in answers:
            if isinstance(answer, Raised):
                raise answer.error
        for number, answer in enumerate(answers):
            if isinstance(answer, Broke):
                raise TrainError(f"rank {number} of the trainer failed: {answer.text}; go on with --resume")
        waiting = [number for number, answer in enumerate(answers) if answer is None]
        if waiting:
            least = min(steps[number] for number in waiting)
            behind = [str(number) for number in waiting if steps[number] == least]
            raise TrainError(
                f"no rank of the trainer got any further within {self._timeout_s:g} s, and the furthest back"
                f" is rank {' and '.join(behind)}; go on with --resume, and with a larger"
                " [train.megatron].timeout_s if they are slow and do not hang"
            )
        return [answer.value for answer in answers if isinstance(answer, Done)]

    def close(self) -> None:
        """Kill them all; a second time is nothing."""
        if self._closed:
            return
        self._closed = True
        for rank in self._ranks:
            rank.kill()
        self._senders.shutdown()  # those who were still sending fail now
        for watcher in self._watchers:
            watcher.join()
        for rank in self._ranks:
            rank.close()

    @property
    def pids(self) -> list[int]:
        """Their process ids, by rank."""
        return [rank.process.pid for rank in self._ranks]


class _Rank:
    """One process, and what it needs in this one."""

    def __init__(
        self, command: Sequence[str], port: int, listener: int, env: Mapping[str, str], timeout_s: float
    ) -> None:
        theirs, alive = os.pipe()  # nothing is written: it tells the process when this one is dead
        ours, other = socket.socketpair()
        patience = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, patience)  # for the rest of what has begun
        self._said: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (as long as the process)
        self._alive, self.connection = alive, Connection(ours.detach())
        arguments = [*command, str(theirs), str(other.fileno()), str(port), str(listener)]
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-W", "ignore", "-m", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=self._said,
                stderr=self._said,
                env=dict(env),
                pass_fds=[theirs, other.fileno(), *([listener] if listener >= 0 else [])],
                start_new_session=True,
            )
        except BaseException:
            self.close()
            raise
        finally:
            os.close(theirs)
            other.close()

    def end(self) -> str:
        """Say how a process ended that does not answer any more."""
        try:
            status = self.process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            return "has closed its connection"
        if status < 0:
            return f"was ended by {signal.Signals(-status).name}"
        size = os.fstat(self._said.fileno()).st_size  # no seek: two threads may ask
        lines = os.pread(self._said.fileno(), size, 0).decode(errors="replace").strip().splitlines()
        return f"ended with exit status {status}: {lines[-1] if lines else 'it said nothing'}"

    def kill(self) -> None:
        """End it, and what it has started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        """Let go of what it needed here."""
        os.close(self._alive)
        self.connection.close()
        self._said.close()


def _send(connection: Connection, message: bytes) -> None:
    with suppress(OSError):  # whoever is dead is found out when it is listened to
        connection.send_bytes(message)
