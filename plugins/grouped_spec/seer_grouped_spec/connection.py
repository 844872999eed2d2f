"""The connection to one draft server: made, lost, backed off from and made anew; and what is to be answered.

Belongs to the client's thread, and never waits: whoever polls ``socket`` for ``events`` calls ``receive``.
"""

from __future__ import annotations

import select
import socket
import time
from contextlib import suppress
from urllib.parse import urlsplit

import attrs
import structlog

from seer_grouped_spec.handshake import GREETING_BYTES, WELCOME_BYTES, Handshake, Unwelcome
from seer_grouped_spec.wire import Codec, Frames, FromServer, ToServer, WireError

__all__ = ["Connection", "Counts", "Lost", "address_of", "try_server"]

BACKOFF_S = (0.2, 5.0)
READ_BYTES = 256 << 10
UNSENT_BYTES = 8 << 20

log = structlog.get_logger("seer.draft_client")


class Lost(Exception):
    """There is no connection any more; ``lasting``: the next one would end likewise."""

    def __init__(self, why: str, *, lasting: bool = False) -> None:
        super().__init__(why)
        self.lasting = lasting


def address_of(endpoint: str) -> tuple[str, int]:
    """Return host and port of ``tcp://HOST:PORT``.

    Raises:
        ValueError: it is no such thing.
    """
    parts = urlsplit(endpoint)
    if parts.scheme != "tcp" or not parts.hostname or not parts.port or parts.path:
        raise ValueError(f"{endpoint!r} is no tcp://HOST:PORT")
    return parts.hostname, parts.port


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
    """Messages to a server and its answers; ``socket`` is None while there is no connection.

    ``away_since`` is None while it is open, that is, while both sides have proved that they know the token.
    """

    def __init__(
        self, endpoint: str, counts: Counts, *, token: bytes, reply_timeout_s: float, now: float
    ) -> None:
        self.socket: socket.socket | None = None
        self.endpoint = endpoint
        self.reply_timeout_s = reply_timeout_s
        self.away_since: float | None = now
        self._address = address_of(endpoint)
        self._token, self._counts = token, counts
        self._codec: Codec[FromServer] = Codec(FromServer)
        self._awaited: dict[int, tuple[type, float]] = {}
        self._seq = 0
        self._tried_at = 0.0
        self._down_until = 0.0
        self._backoff_s = BACKOFF_S[0]
        self._complaint = ""
        self._begin()

    def _begin(self) -> None:
        self._handshake = Handshake(self._token)
        self._greeted = False
        self._frames = Frames()
        self._unsent = bytearray()

    @property
    def events(self) -> int:
        """What to poll for; a server speaks first, so reading tells whether it was reached, too."""
        return select.POLLIN | (select.POLLOUT if self._unsent else 0)

    def ready(self, now: float) -> bool:
        """Connect, if it is time to, and say whether messages may be sent.

        Raises:
            Lost: it cannot be reached.
        """
        if self.socket is None and now >= self._down_until:
            self._connect(now)
        return self.away_since is None

    def next_seq(self) -> int:
        """Return the number of the next message."""
        self._seq += 1
        return self._seq

    def send(self, message: ToServer, now: float) -> bool:
        """Send a message; False if the server cannot be reached now, or has not read the last ones yet."""
        if self.away_since is not None or len(self._unsent) > UNSENT_BYTES:
            return False
        frame = self._codec.encode(message)
        self._awaited[message.seq] = (type(message), now)
        self._counts.bytes_sent += len(frame)
        self._unsent += frame
        self._push()
        return True

    def receive(self, now: float) -> FromServer | None:
        """Go on with what can be done now; return the next answer, None if there is none yet.

        Raises:
            Lost: the connection has ended, or the server is none, or speaks nonsense.
        """
        if self.socket is None:
            return None
        try:
            while True:
                if self.away_since is None:
                    body = self._frames.next()
                    if body is not None:
                        return self._codec.decode(body)
                elif self._meet(now):
                    continue
                self._push()
                data = self.socket.recv(READ_BYTES)
                if not data:
                    raise Lost("it closed the connection")
                self._counts.bytes_received += len(data)
                self._frames.add(data)
        except BlockingIOError:
            return None
        except Unwelcome as error:
            raise Lost(str(error), lasting=True) from None
        except WireError as error:
            raise Lost(f"it spoke nonsense: {error}", lasting=True) from error
        except OSError as error:
            raise Lost(f"it cannot be reached: {error.strerror or error}") from error

    def awaits(self, kind: type) -> bool:
        """Say whether such a message is under way."""
        return any(one is kind for one, _ in self._awaited.values())

    def answered(self, seq: int) -> bool:
        """Note that a message was answered; False if none of this number was under way."""
        if self._awaited.pop(seq, None) is None:
            return False
        self._backoff_s, self._complaint = BACKOFF_S[0], ""
        return True

    def is_late(self, now: float) -> bool:
        """Say whether an answer, or a welcome, has been waited for too long."""
        if self.away_since is not None:
            return self.socket is not None and now - self._tried_at > self.reply_timeout_s
        return any(now - since > self.reply_timeout_s for _, since in self._awaited.values())

    def lose(self, now: float, why: str, *, lasting: bool = False) -> None:
        """Leave the server for a while, for long if what is wrong will last."""
        self._counts.resets += 1
        if why != self._complaint:
            log.warning("draft_server_lost", endpoint=self.endpoint, why=why)
        self._complaint = why
        self.close()
        if self.away_since is None:
            self.away_since = now
        pause_s = BACKOFF_S[1] if lasting else self._backoff_s
        self._down_until = now + pause_s
        self._backoff_s = min(2 * pause_s, BACKOFF_S[1])

    def close(self) -> None:
        """Close the socket, at once."""
        self._awaited.clear()
        if self.socket is not None:
            self.socket.close()
            self.socket = None

    def _connect(self, now: float) -> None:
        self._begin()
        self._tried_at = now
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(*self._address, type=socket.SOCK_STREAM)[
                0
            ]
            self.socket = socket.socket(family, kind, protocol)
            self.socket.setblocking(False)
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with suppress(BlockingIOError):
                self.socket.connect(address)
        except OSError as error:
            raise Lost(f"it cannot be reached: {error.strerror or error}") from error

    def _meet(self, now: float) -> bool:
        """Go on with the handshake; return whether it got any further."""
        if not self._greeted:
            greeting = self._frames.cut(GREETING_BYTES)
            if greeting is None:
                return False
            self._unsent += self._handshake.hello(greeting)
            self._greeted = True
            return True
        welcome = self._frames.cut(WELCOME_BYTES)
        if welcome is None:
            return False
        self._handshake.welcomed(welcome)
        if self._complaint:
            log.info("draft_server_back", endpoint=self.endpoint)
        self.away_since = None
        return True

    def _push(self) -> None:
        """Write what the network takes of what is unsent; that it is gone shows when it is read."""
        if self._unsent and self.socket is not None:
            try:
                sent = self.socket.send(self._unsent)
                del self._unsent[:sent]
            except BlockingIOError:
                pass
            except OSError:
                self._unsent.clear()


def try_server(endpoint: str, token: str, timeout_s: float) -> None:
    """Meet a server once, and leave.

    Raises:
        Lost: it cannot be reached, is no draft server, or has another token.
    """
    now = time.monotonic()
    until = now + timeout_s
    connection = Connection(endpoint, Counts(), token=token.encode(), reply_timeout_s=timeout_s, now=now)
    try:
        while not connection.ready(now) and now < until and connection.socket is not None:
            poller = select.poll()
            poller.register(connection.socket, connection.events)
            poller.poll(1000 * (until - now))
            now = time.monotonic()
            connection.receive(now)
        if connection.away_since is not None:
            raise Lost(f"no answer in {timeout_s:g} s")
    finally:
        connection.close()
