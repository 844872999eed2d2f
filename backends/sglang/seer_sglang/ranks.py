"""The ranks of an instance that spreads its model over several devices: a process for each.

Every rank has a scheduler of its own, as SGLang has it, too.  They plan the same steps, because what changes
a scheduler is called in all of them, in the same order.  What could differ between two processes is rank
0's, and sent to the others: answers of the KV store, drafts, and the tokens that are sampled.
"""

from __future__ import annotations

import pickle
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any, Protocol, TypeVar, cast

import attrs
from seer_host.process import ChildProcess
from seer_worker.process.dead_ranks import NOTICE_S, end_after_grace

from seer_core.errors import EngineError
from seer_sglang.forked_rank import ForkedRank, can_fork

__all__ = ["Flaw", "FollowingRank", "LeadingRank", "RankGroup", "in_all_ranks"]

T = TypeVar("T")
Method = TypeVar("Method", bound=Callable[..., Any])

Rank = ChildProcess | ForkedRank

MODULE = "seer_sglang.rank"
"""Has ``main``, which is a rank."""


@attrs.frozen
class Flaw:
    """Why a rank could not do its part."""

    reason: str


class RankGroup(Protocol):
    """The ranks of an instance, as one of them sees them."""

    number: int
    count: int

    def agreed(self, make: Callable[[], T]) -> T:
        """Return what ``make`` returns in rank 0, where alone it is called; every rank must ask for it."""
        ...

    @contextmanager
    def calling(self, method: str, arguments: Sequence[Any], named: Mapping[str, Any]) -> Iterator[None]:
        """In rank 0, have a method of the other engines called, while its own runs."""
        ...


class LeadingRank:
    """Rank 0, which runs in the worker's process and starts the others; they end with it."""

    number = 0

    def __init__(self, count: int = 1) -> None:
        """Start the others, which wait for what ``send`` sends first; fork them, if a fork is sound."""
        self.count = count
        self._calling = False
        self._closed = False
        self._dead: list[str] = []
        self._others: list[tuple[Rank, Connection]] = []
        forks = count > 1 and can_fork()
        for number in range(1, count):
            here, there = socket.socketpair()
            with there:
                process = (_fork if forks else _start)(number, here, there.fileno())
            self._others.append((process, Connection(here.detach())))
        for number, (process, _) in enumerate(self._others, 1):  # a process with threads could not fork
            threading.Thread(target=self._watch, args=[number, process], daemon=True).start()

    def agreed(self, make: Callable[[], T]) -> T:
        """Return what ``make`` returns, in all ranks."""
        made = make()
        self.send(made)
        return made

    @contextmanager
    def calling(self, method: str, arguments: Sequence[Any], named: Mapping[str, Any]) -> Iterator[None]:
        """Have a method of the other engines called, but within another such call, which makes it there."""
        if self._calling or not self._others:
            yield
            return
        self._calling = True
        try:
            self.send((method, arguments, named))
            with self._noticing_dead_ranks():
                yield
        finally:
            self._calling = False

    def send(self, message: object) -> None:
        """Send a message to the others.

        Raises:
            EngineError: one of them has ended.
        """
        if self._others:
            data = pickle.dumps(message)
            with self._noticing_dead_ranks():
                for _, connection in self._others:
                    connection.send_bytes(data)

    def answers(self) -> list[Any]:
        """Return what the others have answered, in order.

        Raises:
            EngineError: one of them could not do its part, or has ended.
        """
        with self._noticing_dead_ranks():
            answers = [connection.recv() for _, connection in self._others]
        for number, answer in enumerate(answers, 1):
            if isinstance(answer, Flaw):
                raise EngineError(f"rank {number} {answer.reason}")
        return answers

    def close(self) -> None:
        """End the others."""
        self._closed = True
        for process, connection in self._others:
            connection.close()
            process.kill()
        for process, _ in self._others:
            process.end()

    @contextmanager
    def _noticing_dead_ranks(self) -> Iterator[None]:
        """Turn the error that a dead rank causes here into one that says so."""
        try:
            yield
        except (RuntimeError, OSError, EOFError) as error:
            end_s = time.monotonic() + NOTICE_S
            while self._others and not self._dead and time.monotonic() < end_s:
                time.sleep(0.01)
            if self._dead:
                raise EngineError(f"{self._dead[0]}: {error}") from error
            raise

    def _watch(self, number: int, process: Rank) -> None:
        """End this process, too, when a rank has died."""
        process.wait_unreaped()
        if self._closed:
            return
        process.wait()
        reason = f"rank {number} of its {self.count} was {process.reason()}"
        self._dead.append(reason)
        end_after_grace(reason, lambda: self._closed)


def _fork(number: int, here: socket.socket, fd: int) -> ForkedRank:
    """Fork a rank, which has imported SGLang then."""
    main = import_module(MODULE).main
    return ForkedRank(f"{MODULE} {number}", partial(main, number), here, fd)


def _start(number: int, here: socket.socket, fd: int) -> ChildProcess:
    """Start a rank as a process of its own, which imports SGLang anew."""
    return ChildProcess([sys.executable, "-P", "-m", MODULE, str(number), str(fd)], pass_fds=[fd])


class FollowingRank:
    """Any other rank."""

    def __init__(self, number: int, count: int, connection: Connection) -> None:
        self.number, self.count = number, count
        self._connection = connection

    def receive(self) -> Any:
        """Return the next message of rank 0."""
        return self._connection.recv()

    def agreed(self, make: Callable[[], T]) -> T:
        """Return what rank 0 has made."""
        made: T = self._connection.recv()
        return made

    @contextmanager
    def calling(self, method: str, arguments: Sequence[Any], named: Mapping[str, Any]) -> Iterator[None]:
        """Call it here: rank 0 has asked for it."""
        yield

    def answer(self, value: object = None) -> None:
        """Answer rank 0."""
        self._connection.send(value)


def in_all_ranks(method: Method) -> Method:
    """Have this method of rank 0's engine called in the engines of all ranks, which have their ``ranks``."""

    @wraps(method)
    def call(engine: Any, *arguments: Any, **named: Any) -> Any:
        with engine.ranks.calling(method.__name__, arguments, named):
            return method(engine, *arguments, **named)

    return cast("Method", call)
