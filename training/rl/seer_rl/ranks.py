"""Processes that compute together: started, all asked at once, watched while they answer, and ended.

A rank that dies leaves the others waiting for it, and so does one that hangs.  So the trainer waits only as
long as some rank gets on, and ends them all when one is lost.  A rank that dies between two questions is
reported by a thread that watches it.
"""

from __future__ import annotations

import os
import selectors
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import IO, Any

import attrs
import numpy as np
from seer_host.frames import Frames, WireError, encode
from seer_host.process import ChildProcess, log_tail

from seer_rl.errors import TrainError
from seer_rl.rank_messages import (
    Broke,
    Done,
    FromRank,
    Raised,
    RankProgress,
    TensorAssembler,
    TensorPiece,
    ToRank,
)

__all__ = ["RankAnswer", "Ranks"]

GRACE_S = 5.0
"""How long the others may take to answer, or to die, after one has failed: so that the cause is reported."""
RECEIVE_BYTES = 1 << 20


@attrs.frozen
class RankAnswer:
    """The numbers and arrays that a rank has computed."""

    metrics: dict[str, int | float]
    arrays: dict[str, np.ndarray[Any, Any]]


class _Lost:
    """A rank is dead."""


Outcome = RankAnswer | Raised | Broke | _Lost | None


class Ranks:
    """As many processes of one module, which ``seer_rl.megatron_rank`` shows; asked by one thread at a time.

    Each is run as ``python -m MODULE RANK CONNECTION PORT LISTENER``: the descriptor of a connection, a port
    on the loopback where the ranks meet, and, in rank 0, the descriptor of the socket that listens there
    (elsewhere -1).
    """

    def __init__(self, module: str, count: int, environment: Mapping[str, str], timeout_s: float) -> None:
        """Start ``count`` processes."""
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
                    self._ranks.append(
                        _Rank([module, str(number)], port, file, {**os.environ, **environment})
                    )
            except BaseException:
                self.close()
                raise

    def ask(self, *messages: ToRank) -> list[RankAnswer]:
        """Send every rank these messages, of which the last is answered; return the answers, by rank.

        Raises:
            Exception: what a rank raised; all others have answered, and may be asked again.
            TrainError: a rank is lost or hung; all have been ended.
        """
        if self._closed:
            raise TrainError("the trainer's ranks have ended; go on with --resume")
        # A rank that hangs may not even read: what is sent must not hold this thread up.
        frames = [encode(message) for message in messages]
        for rank in self._ranks:
            self._senders.submit(rank.send, frames)
        outcomes = self._outcomes()
        try:
            return self._answers(outcomes)
        except BaseException as error:
            if not all(isinstance(each, RankAnswer | Raised) for each in outcomes):
                self._failure = error if isinstance(error, TrainError) else None
                self.close()
            raise

    def when_lost(self, notify: Callable[[TrainError], None]) -> None:
        """Have ``notify`` called, in a thread of its own, once a rank is lost or hangs, asked or not.

        It may be called once for each rank, but for their end by ``close``, which waits for such calls.
        """
        for number in range(len(self._ranks)):
            thread = threading.Thread(target=self._watch, args=[number, notify], name="seer-rank-watch")
            self._watchers.append(thread)
            thread.start()

    def _watch(self, number: int, notify: Callable[[TrainError], None]) -> None:
        self._ranks[number].process.wait_unreaped()
        if not self._closed:
            notify(self._loss(number))
        elif self._failure is not None:  # another thread asked, and all were ended
            notify(self._failure)

    def _loss(self, number: int) -> TrainError:
        return TrainError(f"rank {number} of the trainer {self._ranks[number].reason()}; go on with --resume")

    def _outcomes(self) -> list[Outcome]:
        """Return what each rank answered, None for one that hangs."""
        outcomes: list[Outcome] = [None] * len(self._ranks)
        end, failed = time.monotonic() + self._timeout_s, False
        with selectors.DefaultSelector() as waiting:
            for number, rank in enumerate(self._ranks):
                rank.begin()
                waiting.register(rank.connection, selectors.EVENT_READ, number)
            while waiting.get_map():
                ready = waiting.select(max(0.0, end - time.monotonic()))
                if not ready:
                    break
                if not failed:
                    end = time.monotonic() + self._timeout_s
                for key, _ in ready:
                    outcome = outcomes[key.data] = self._ranks[key.data].receive()
                    if outcome is None:
                        continue
                    waiting.unregister(key.fileobj)
                    if not failed and not isinstance(outcome, RankAnswer):
                        end, failed = time.monotonic() + GRACE_S, True
        return outcomes

    def _answers(self, outcomes: Sequence[Outcome]) -> list[RankAnswer]:
        """Return what the ranks answered, or raise what went wrong first."""
        for number, outcome in enumerate(outcomes):
            if isinstance(outcome, _Lost):
                raise self._loss(number)
        for outcome in outcomes:
            if isinstance(outcome, Raised):
                raise outcome.error
        for number, outcome in enumerate(outcomes):
            if isinstance(outcome, Broke):
                raise TrainError(f"rank {number} of the trainer failed: {outcome.text}; go on with --resume")
        waiting = [number for number, outcome in enumerate(outcomes) if outcome is None]
        if waiting:
            least = min(self._ranks[number].steps for number in waiting)
            behind = [str(number) for number in waiting if self._ranks[number].steps == least]
            raise TrainError(
                f"no rank of the trainer got any further within {self._timeout_s:g} s, and the furthest back"
                f" is rank {' and '.join(behind)}; go on with --resume, and with a larger"
                " [train.megatron].timeout_s if they are slow and do not hang"
            )
        return [outcome for outcome in outcomes if isinstance(outcome, RankAnswer)]

    def close(self) -> None:
        """Kill them all; a second time is nothing."""
        if self._closed:
            return
        self._closed = True
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.process.end()
        self._senders.shutdown()  # what was still being sent fails now
        for watcher in self._watchers:
            watcher.join()
        for rank in self._ranks:
            rank.close()

    @property
    def pids(self) -> list[int]:
        """Their process ids, by rank."""
        return [rank.process.pid for rank in self._ranks]


class _Rank:
    """One process, and its connection."""

    def __init__(self, command: Sequence[str], port: int, listener: int, env: Mapping[str, str]) -> None:
        self.connection, theirs = socket.socketpair()
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (as long as the process)
        self._frames: Frames[FromRank] = Frames(FromRank)
        self.begin()
        arguments = [*command, str(theirs.fileno()), str(port), str(listener)]
        try:
            self.process = ChildProcess(
                [sys.executable, "-P", "-W", "ignore", "-m", *arguments],
                environment=env,
                log=self._log,
                pass_fds=[theirs.fileno(), *([listener] if listener >= 0 else [])],
            )
        except BaseException:
            self.close()
            raise
        finally:
            theirs.close()

    def begin(self) -> None:
        """Expect the answer to the next question."""
        self.steps = 0
        self._tensors = TensorAssembler()

    def send(self, frames: Sequence[bytes]) -> None:
        with suppress(OSError):  # a dead rank is found when its answer is waited for
            for frame in frames:
                self.connection.sendall(frame)

    def receive(self) -> Outcome:
        """Read what has come; return the answer if that is complete."""
        try:
            data = self.connection.recv(RECEIVE_BYTES)
            if not data:
                return _Lost()
            for message in self._frames.feed(data):
                match message:
                    case RankProgress():
                        self.steps += 1
                    case TensorPiece():
                        self._tensors.add(message)
                    case Done():
                        return RankAnswer(message.metrics, self._tensors.arrays())
                    case Raised() | Broke():
                        return message
        except WireError as error:
            return Broke(str(error))
        except OSError:
            return _Lost()
        return None

    def reason(self) -> str:
        """Describe how a process ended that does not answer any more."""
        status = self.process.wait(GRACE_S)
        if status is None:
            return "has closed its connection"
        if status < 0:
            return f"was {self.process.reason()}"
        lines = [line for line in log_tail(self._log) if line.strip()] or ["it has written nothing"]
        return f"{self.process.reason()}: {lines[-1]}"

    def close(self) -> None:
        """Close what it needed here."""
        self.connection.close()
        self._log.close()
