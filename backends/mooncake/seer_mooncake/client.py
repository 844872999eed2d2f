"""Mooncake's client, with a bound on every wait.

Its calls may block too long: 90 s where no master answers at the start, 60 s for
a segment whose owner hangs, 30 s for a master that hangs, and 4 s for each call once the master is dead
(measured with 0.3.13).  So one thread makes all calls and the caller waits for it only so long.  After a
wait that was too long, or an error code for a master out of reach, the client is *away*: calls are
answered at once, with nothing, and every second the thread looks whether the master is there again.

Mooncake's setup, its end and its destructor hold Python's global lock while they wait for a master, and with
it the whole process (7 to 90 s where there is none, measured).  So a client is set up and ended only where a
master answers, and its object is destroyed with its end, not whenever garbage is collected.
"""

from __future__ import annotations

import math
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import structlog

__all__ = ["MooncakeClient", "answers"]

log = structlog.get_logger("seer")

UNREACHABLE = frozenset((-900, -901))
"""RPC_FAIL and RPC_TIMEOUT: the master, not the key."""
RETRY_S = 1.0
CLOSE_S = 8.0
"""2 s are usual, 4 s with a disk."""

Work = Callable[[Any], Any]


def answers(address: str, timeout_s: float) -> bool:
    """Return whether a server listens at ``host:port``."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout_s).close()
    except OSError:
        return False
    return True


class MooncakeClient:
    """A ``MooncakeDistributedStore`` that ``make`` sets up, in a thread of its own.

    ``make`` is called again, every second, until it succeeds; it raises if it cannot.  ``on_away`` is called
    with why whenever the client goes away.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        start_timeout_s: float,
        timeout_s: float,
        on_away: Callable[[str], None],
    ) -> None:
        self._make, self._timeout_s, self._on_away = make, timeout_s, on_away
        self._store: Any = None
        self._away = False
        self._retry_at = 0.0
        self._jobs: queue.SimpleQueue[tuple[Work, Future[Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="seer-mooncake", daemon=True).start()
        try:
            self._submit(self._revive).result(start_timeout_s)
        except Exception as error:
            self._leave(f"{type(error).__name__}: {error}")

    def batch(self, method: str, keys: Sequence[str], *arguments: Any) -> list[int]:
        """Call a batch method; return its code for each key, or nothing at all while away."""
        if self._away:
            self._look()
            return []
        try:
            codes: list[int] = self._submit(lambda store: getattr(store, method)(keys, *arguments)).result(
                self._timeout_s
            )
        except Exception as error:
            self._leave(f"{method}: {type(error).__name__}: {error}")
            return []
        if UNREACHABLE.intersection(codes):
            self._leave(f"{method}: the master is out of reach")
            return []
        return codes

    def later(self, work: Work) -> None:
        """Queue a call behind those made so far, and return at once."""
        if not self._away:
            self._submit(work)

    def close(self, master: bool = True) -> None:
        """End the client, unless it is away or has no ``master``: it would wait, and hold Python up."""
        if master and not self._away:
            ended = self._submit(self._end)
            self._jobs.put(None)
            try:
                ended.result(CLOSE_S)
            except Exception as error:
                log.warning("kv_client_does_not_end", error=repr(error))
        self._away, self._retry_at = True, math.inf

    def _leave(self, why: str) -> None:
        self._away, self._retry_at = True, time.monotonic() + RETRY_S
        self._on_away(why)
        log.warning("kv_pool_away", why=why)

    def _look(self) -> None:
        """Have the thread look for the master, unless it is still busy, or has just looked."""
        if time.monotonic() >= self._retry_at and self._jobs.empty():
            self._retry_at = time.monotonic() + RETRY_S
            self._submit(self._revive).add_done_callback(self._returned)

    def _revive(self, store: Any) -> None:
        if store is None:
            self._store = self._make()
        elif store.health_check() != 0:
            raise ConnectionError("the master is out of reach")

    def _returned(self, looked: Future[Any]) -> None:
        if self._away and looked.exception() is None and self._retry_at != math.inf:
            self._away = False
            log.info("kv_pool_back")

    def _end(self, store: Any) -> None:
        self._store = None
        store.close()

    def _submit(self, work: Work) -> Future[Any]:
        future: Future[Any] = Future()
        self._jobs.put((work, future))
        return future

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            work, future = job
            try:
                future.set_result(work(self._store))
            except BaseException as error:
                future.set_exception(error)
