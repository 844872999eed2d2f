"""The socket to one draft server: lost, backed off from and made anew; and what is still to be answered."""

from __future__ import annotations

from contextlib import suppress

import attrs
import structlog
import zmq

from seer_grouped_spec.wire import MAX_MESSAGE_BYTES, Codec, FromServer, ToServer, WireError

__all__ = ["Connection", "Counts"]

BACKOFF_S = (0.2, 5.0)
RETRY_S = 0.05

log = structlog.get_logger("seer.draft_client")


@attrs.define(eq=False)
class Counts:
    """What has happened to a client, over all its servers; plain sums, written by its thread."""

    tokens_sent: int = 0
    tokens_received: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    updates: int = 0
    fetches: int = 0
    refused: int = 0
    gaps: int = 0
    disagreements: int = 0
    gave_up: int = 0
    rejected: int = 0
    dropped_tokens: int = 0
    server_errors: int = 0
    resets: int = 0
    bad_calls: int = 0
    internal_errors: int = 0


class Connection:
    """Messages to a server and its answers; ``socket`` is None while there is no connection."""

    def __init__(
        self,
        endpoint: str,
        context: zmq.Context[zmq.Socket[bytes]],
        poller: zmq.Poller,
        counts: Counts,
        *,
        key: bytes,
        reply_timeout_s: float,
    ) -> None:
        self.socket: zmq.Socket[bytes] | None = None
        self.reply_timeout_s = reply_timeout_s
        self._endpoint, self._key = endpoint, key
        self._context, self._poller, self._counts = context, poller, counts
        self._codec: Codec[FromServer] = Codec(FromServer)
        self._awaited: dict[int, tuple[type, float]] = {}
        self._seq = 0
        self._down_until = 0.0
        self._backoff_s = BACKOFF_S[0]
        self._complaint = ""

    def ready(self, now: float) -> bool:
        """Connect, if it is time to, and say whether messages may be sent."""
        if now < self._down_until:
            return False
        if self.socket is None:
            self.socket = socket = self._context.socket(zmq.DEALER)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.IMMEDIATE, 1)
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
            socket.setsockopt(zmq.IPV6, int("[" in self._endpoint))
            socket.setsockopt(zmq.RECONNECT_IVL, 100)
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
            socket.connect(self._endpoint)
            self._poller.register(socket, zmq.POLLIN)
        return True

    def next_seq(self) -> int:
        """Return the number of the next message."""
        self._seq += 1
        return self._seq

    def send(self, message: ToServer, now: float) -> bool:
        """Send a message; False if the server cannot be reached now."""
        if self.socket is None:
            return False
        frame = self._codec.encode(message, self._key)
        try:
            self.socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            self._down_until = now + RETRY_S
            return False
        self._awaited[message.seq] = (type(message), now)
        self._counts.bytes_sent += len(frame)
        return True

    def receive(self) -> FromServer | None:
        """Return the next answer, None if there is none yet.

        Raises:
            WireError: it is no answer.
        """
        if self.socket is None:
            return None
        try:
            frames = self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        self._counts.bytes_received += sum(map(len, frames))
        if len(frames) != 1:
            raise WireError("message", f"an answer of {len(frames)} frames")
        return self._codec.decode(frames[0])

    def awaits(self, kind: type) -> bool:
        """Say whether such a message is under way."""
        return any(one is kind for one, _ in self._awaited.values())

    def awaits_answer(self, seq: int) -> bool:
        """Say whether the message of this number is under way."""
        return seq in self._awaited

    def answered(self, seq: int) -> bool:
        """Note that a message was answered; False if none of this number was under way."""
        if self._awaited.pop(seq, None) is None:
            return False
        self._backoff_s, self._complaint = BACKOFF_S[0], ""
        return True

    def is_late(self, now: float) -> bool:
        """Say whether an answer has been waited for too long."""
        return any(now - since > self.reply_timeout_s for _, since in self._awaited.values())

    def lose(self, now: float, why: str, *, long: bool = False) -> None:
        """Leave the server for a while, or ``long``."""
        self._counts.resets += 1
        if why != self._complaint:
            log.warning("draft_server_lost", endpoint=self._endpoint, why=why)
        self._complaint = why
        self.close()
        pause_s = BACKOFF_S[1] if long else self._backoff_s
        self._down_until = now + pause_s
        self._backoff_s = min(2 * pause_s, BACKOFF_S[1])

    def close(self) -> None:
        """Close the socket, at once."""
        self._awaited.clear()
        if self.socket is not None:
            with suppress(KeyError):
                self._poller.unregister(self.socket)
            self.socket.close(0)
            self.socket = None
