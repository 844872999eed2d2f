"""The draft servers' client in an engine's worker: a thread of its own, and calls that never wait.

The engine's thread only puts things into queues.  The client's thread sends them every ``flush_s``, asks
for what others wrote every ``fetch_s``, and hands that to ``deliver``, which should release the GIL.  It
sleeps in between: every moment of it that holds the GIL is stolen from the engine's step.
"""

from __future__ import annotations

import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import attrs
import numpy as np
import structlog

from seer_core.errors import tell_nobody
from seer_grouped_spec.connection import Counts
from seer_grouped_spec.link import Link
from seer_grouped_spec.wire import MAX_TTL_S, TOKEN_BYTES, server_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from seer_grouped_spec.link import Deliver
    from seer_grouped_spec.outbox import Text

    Int32 = NDArray[np.int32]

__all__ = ["DraftClient"]

STOP_S = 1.0
LONGEST_NAP_S = 0.1
INT32 = np.dtype("<i4")

log = structlog.get_logger("seer.draft_client")


class DraftClient:
    """One engine's part in all draft servers; groups are spread over ``endpoints`` by their id.

    ``deliver(group_id, request_id, prev_token_count, tokens)`` takes what others wrote, int32, read-only;
    it may repeat text that the engine has got meanwhile.  ``text(group_id, request_id, start, stop)``
    returns the engine's own text between two positions of a response, or less from the same start, or None
    if it is gone; only then is text lost for others.  ``tell(reason)`` hears of whatever keeps text from
    being shared, once of each.  All are called on the client's thread.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        deliver: Deliver,
        text: Text,
        tell: Callable[[str], None] = tell_nobody,
        token: str | None = None,
        flush_s: float = 0.05,
        fetch_s: float = 0.1,
        reply_timeout_s: float = 2.0,
        queue_bytes: int = 32 << 20,
    ) -> None:
        if not endpoints:
            raise ValueError("a draft client needs the endpoint of a server, or more")
        if not (flush_s > 0 and fetch_s > 0 and reply_timeout_s > 0 and queue_bytes > 0):
            raise ValueError("flush_s, fetch_s, reply_timeout_s and queue_bytes must be positive")
        self._flush_s, self._fetch_s = flush_s, fetch_s
        self._queue_bytes = queue_bytes
        self._counts = Counts()
        self._calls: deque[tuple[str, float | None]] = deque()
        self._appends: deque[tuple[str, str, int, bytes]] = deque()
        self._put_bytes = self._taken_bytes = 0  # one writer each: the engine's thread, the client's
        self._dropped_tokens = self._bad_calls = 0
        self._cpu_s = 0.0
        self._stopping = False
        now = time.monotonic()
        self._links = [
            Link(
                endpoint,
                self._counts,
                token=b"" if token is None else token.strip().encode(),
                deliver=deliver,
                text=text,
                tell=tell,
                reply_timeout_s=reply_timeout_s,
                queue_bytes=queue_bytes // len(endpoints),
                now=now,
            )
            for endpoint in endpoints
        ]
        self._thread = threading.Thread(target=self._run, name="seer-draft-client", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def register_group(self, group_id: str, ttl_s: float) -> None:
        """Take part in a group, until unregistered, or until nothing is written in it for ``ttl_s``."""
        try:
            if not 0 < ttl_s <= MAX_TTL_S:
                raise ValueError
            self._calls.append((group_id, float(ttl_s)))
        except Exception:
            self._bad_calls += 1

    def unregister_group(self, group_id: str) -> None:
        """Take part in a group no more; nothing more of it is delivered, but for what is on its way."""
        self._calls.append((group_id, None))

    def appended(self, group_id: str, request_id: str, prev_token_count: int, tokens: Int32) -> None:
        """Tell of int32 tokens that this engine wrote after the first ``prev_token_count`` of a response.

        Without tokens: that the response, of so many tokens, is here, to be continued.  Copies, and
        returns at once; beyond ``queue_bytes`` the oldest goes, to be asked from ``text`` later.
        """
        try:
            if tokens.dtype != INT32:
                tokens = np.asarray(tokens).astype(INT32, casting="safe")
            data = tokens.tobytes()
            self._appends.append((group_id, request_id, int(prev_token_count), data))
            self._put_bytes += len(data)
        except Exception:
            self._bad_calls += 1
            return
        while self._put_bytes - self._taken_bytes > self._queue_bytes:
            try:
                data = self._appends.popleft()[3]
            except IndexError:  # the other thread has them already
                return
            self._put_bytes -= len(data)
            self._dropped_tokens += len(data) // TOKEN_BYTES

    def stats(self) -> dict[str, float]:
        """Return sums since the start; ``unsent_age_s`` of the oldest text not yet sent; ``fetch_age_s``
        since the last answer of the server that is furthest behind; ``cpu_s`` of the thread.
        """
        now = time.monotonic()
        unsent = [since for link in self._links if (since := link.unsent_since) is not None]
        figures: dict[str, float] = attrs.asdict(self._counts)
        figures["dropped_tokens"] += self._dropped_tokens
        figures["bad_calls"] += self._bad_calls
        return {
            **figures,
            "unsent_age_s": now - min(unsent) if unsent else 0.0,
            "fetch_age_s": now - min(link.fetched_at for link in self._links),
            "cpu_s": self._cpu_s,
        }

    def stop(self) -> None:
        """End the thread and close all connections, within ``STOP_S``; idempotent."""
        self._stopping = True
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(STOP_S)

    def _run(self) -> None:
        links = self._links
        next_tick = next_fetch = time.monotonic()
        while not self._stopping:
            nap_s = max(0.0, min(next_tick - time.monotonic(), LONGEST_NAP_S))
            ready = self._poll(int(nap_s * 1000) + 1)
            now = time.monotonic()
            is_tick = now >= next_tick
            is_fetch = is_tick and now >= next_fetch
            if is_tick:
                next_tick = now + self._flush_s
                self._guarded(self._drain, now)
            if is_fetch:
                next_fetch = now + self._fetch_s - self._flush_s / 2
            for link in links:
                if link in ready:
                    self._guarded(link.receive, now, link=link)
                if is_tick:
                    self._guarded(link.tick, now, link=link, fetch=is_fetch)
            self._cpu_s = time.thread_time()
        for link in links:
            link.close()

    def _poll(self, timeout_ms: int) -> list[Link]:
        """Return the links that something has arrived for, or that may write on."""
        poller, links = select.poll(), {}
        for link in self._links:
            if link.socket is not None:
                links[link.socket.fileno()] = link
                poller.register(link.socket, link.events)
        return [links[descriptor] for descriptor, _ in poller.poll(timeout_ms)]

    def _drain(self, now: float) -> None:
        """Give what the engine's thread has queued to the links: joins, then text, then leaves."""
        last: dict[str, float | None] = {}
        for _ in range(len(self._calls)):
            group_id, ttl_s = self._calls.popleft()
            link = self._link_of(group_id)
            if link is None:
                continue
            if ttl_s is not None:
                if last.get(group_id, ttl_s) is None:
                    link.unregister(group_id)
                link.register(group_id, ttl_s, now)
            last[group_id] = ttl_s
        with suppress(IndexError):
            while True:
                group_id, request_id, prev_token_count, data = self._appends.popleft()
                self._taken_bytes += len(data)
                link = self._link_of(group_id)
                if link is not None:
                    link.appended(group_id, request_id, prev_token_count, data, now)
        for group_id, ttl_s in last.items():
            if ttl_s is None:
                link = self._link_of(group_id)
                if link is not None:
                    link.unregister(group_id)

    def _link_of(self, group_id: str) -> Link | None:
        try:
            return self._links[server_of(group_id, len(self._links))]
        except Exception:
            self._counts.bad_calls += 1
            return None

    def _guarded(self, work: Callable[..., None], now: float, link: Link | None = None, **more: bool) -> None:
        """Call ``work``; a fault of ours costs the connection, never the thread."""
        try:
            work(now, **more)
        except Exception:
            self._counts.internal_errors += 1
            log.exception("draft_client_fault")
            if link is not None:
                link.reset(now, "a fault of this client")
