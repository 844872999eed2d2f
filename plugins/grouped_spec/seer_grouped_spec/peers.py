"""A draft server's connections: who may speak, whose turn it is, and how much each may make it hold.

One thread around non-blocking sockets.  A connection that has not proved that it knows the token may make the
server hold no more than its hello.  One that has may have a message on its way in and an answer on its way
out, no more: until the answer is read nothing more is read from it.  All messages under way share
``room_bytes``; beyond that the connection with the most of them is closed, and so is one that keeps the
server waiting for ``STALL_S``.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

import attrs
import structlog

from seer_grouped_spec.handshake import HELLO_BYTES, Handshake
from seer_grouped_spec.wire import Frames, WireError

__all__ = ["Peers"]

MAX_PEERS = 512
MAX_STRANGERS = 64
HELLO_S = 5.0
STALL_S = 10.0
READ_BYTES = 256 << 10
MESSAGES_PER_TURN = 64
COMPLAINT_S = 1.0
KEEPALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))

Answer = Callable[[int, bytes, float], bytes]
"""Called with a connection's number, a message, and the time; returns the frame to answer with."""

log = structlog.get_logger("seer.draft_server")


@attrs.define(eq=False)
class Peer:
    """One connection; ``since``: from when on it has owed its hello, the rest of a message, or a look at its
    answer; ``heard``: when it last said anything.
    """

    socket: socket.socket
    number: int
    handshake: Handshake
    since: float
    heard: float
    known: bool = False
    waits: bool = True
    frames: Frames = attrs.field(factory=Frames)
    unsent: bytes = b""
    held_bytes: int = 0


class Peers:
    """The connections of one listening socket; ``answer`` never raises, ``left`` hears whose has ended."""

    def __init__(
        self,
        listener: socket.socket,
        token: bytes,
        room_bytes: int,
        answer: Answer,
        left: Callable[[int], None],
    ) -> None:
        self.faults: Counter[str] = Counter()
        self.received_bytes = self.sent_bytes = 0
        self._listener, self._token, self._room_bytes = listener, token, room_bytes
        self._answer, self._left = answer, left
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._peers: dict[int, Peer] = {}
        self._strangers: dict[int, Peer] = {}  # oldest first
        self._hasty: dict[int, Peer] = {}  # have sent more than their turn was long enough for
        self._numbers = 0
        self._held_bytes = 0
        self._quiet_until = 0.0

    def watch(self, descriptor: int) -> None:
        """Have ``turn`` end early when there is something to read there."""
        self._selector.register(descriptor, selectors.EVENT_READ)

    def turn(self, timeout_s: float) -> None:
        """Wait until something happens, for so long at most, and deal with it."""
        for key, _ in self._selector.select(0 if self._hasty else timeout_s):
            peer = key.data
            if peer is not None:
                self._deal_with(peer)
            elif key.fileobj is self._listener:
                self._accept()
        for peer in list(self._hasty.values()):
            self._deal_with(peer)

    def sweep(self, now: float, silence_s: float, has_part: Callable[[int], bool]) -> None:
        """Close what has kept the server waiting, and who has part in something and is silent for so long."""
        for peer in list(self._peers.values()):
            if not peer.known and now - peer.since > HELLO_S:
                self._close(peer, "stranger", "no hello", now)
            elif peer.known and peer.waits and now - peer.since > STALL_S:
                self._close(peer, "stall", "half a message, or an answer that is not read", now)
            elif peer.known and now - peer.heard > silence_s and has_part(peer.number):
                self._close(peer, "silence", f"nothing heard for {silence_s:g} s", now)

    def complain(self, kind: str, reason: str, now: float) -> None:
        """Count a fault, and log it unless another was just logged."""
        self.faults[kind] += 1
        if now >= self._quiet_until:
            self._quiet_until = now + COMPLAINT_S
            log.warning("draft_message_refused", kind=kind, reason=reason, so_far=self.faults[kind])

    def close(self) -> None:
        """Close everything."""
        for peer in list(self._peers.values()):
            self._end(peer)
        self._selector.close()

    def _accept(self) -> None:
        now = time.monotonic()
        try:
            connection, _ = self._listener.accept()
        except OSError as error:  # gone again, or no descriptor is left: then the oldest stranger's is
            if self._strangers and not isinstance(error, BlockingIOError):
                self._close(next(iter(self._strangers.values())), "stranger", "too many connections", now)
            return
        if len(self._strangers) >= MAX_STRANGERS or len(self._peers) >= MAX_PEERS:
            if not self._strangers:
                self.complain("full", f"more than {MAX_PEERS} connections", now)
                connection.close()
                return
            self._close(next(iter(self._strangers.values())), "stranger", "too many connections", now)
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE:  # a machine that is gone says no goodbye
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        self._numbers += 1
        peer = Peer(connection, self._numbers, Handshake(self._token), now, now)
        self._peers[peer.number] = self._strangers[peer.number] = peer
        self._selector.register(connection, selectors.EVENT_READ, peer)
        try:
            connection.send(peer.handshake.greeting())
        except OSError:
            self._end(peer)

    def _deal_with(self, peer: Peer) -> None:
        """Write what is unsent, else read; then answer, for one turn."""
        now = time.monotonic()
        try:
            if peer.unsent:
                self._send(peer, peer.unsent, now)
            elif peer.number not in self._hasty:
                wanted = READ_BYTES if peer.known else HELLO_BYTES - len(peer.frames)
                data = peer.socket.recv(wanted)
                if not data:
                    self._end(peer)
                    return
                self.received_bytes += len(data)
                peer.heard = now
                peer.frames.add(data)
            self._answer_all(peer, now)
        except BlockingIOError:
            pass
        except WireError as error:
            self._close(peer, "message" if peer.known else "key", str(error), now)
            return
        except OSError:
            self._end(peer)
            return
        held_bytes = len(peer.frames) + len(peer.unsent)
        self._held_bytes += held_bytes - peer.held_bytes
        peer.held_bytes = held_bytes
        waits = held_bytes > 0 or not peer.known
        if waits and not peer.waits:
            peer.since = now
        peer.waits = waits
        while self._held_bytes > self._room_bytes:
            largest = max(self._peers.values(), key=lambda one: one.held_bytes)
            self._close(largest, "room", f"{largest.held_bytes} bytes under way", now)

    def _answer_all(self, peer: Peer, now: float) -> None:
        self._hasty.pop(peer.number, None)
        if not peer.known:
            self._meet(peer, now)
        for _ in range(MESSAGES_PER_TURN if peer.known else 0):
            if peer.unsent:
                return
            message = peer.frames.next()
            if message is None:
                return
            self._send(peer, self._answer(peer.number, message, now), now)
        if peer.known and not peer.unsent and len(peer.frames):
            self._hasty[peer.number] = peer

    def _meet(self, peer: Peer, now: float) -> None:
        hello = peer.frames.cut(HELLO_BYTES)
        if hello is None:
            return
        try:
            welcome = peer.handshake.welcome(hello)
        except WireError:
            with suppress(OSError):
                peer.socket.send(Handshake.refusal())
            raise
        del self._strangers[peer.number]
        peer.known = True
        self._send(peer, welcome, now)

    def _send(self, peer: Peer, data: bytes, now: float) -> None:
        had_some = bool(peer.unsent)
        try:
            sent = peer.socket.send(data)
        except BlockingIOError:
            sent = 0
        self.sent_bytes += sent
        peer.unsent = data[sent:] if sent < len(data) else b""
        if not peer.unsent:
            peer.since = now
        if had_some != bool(peer.unsent):
            events = selectors.EVENT_WRITE if peer.unsent else selectors.EVENT_READ
            self._selector.modify(peer.socket, events, peer)

    def _close(self, peer: Peer, kind: str, why: str, now: float) -> None:
        self.complain(kind, why, now)
        self._end(peer)

    def _end(self, peer: Peer) -> None:
        if self._peers.pop(peer.number, None) is None:
            return
        self._strangers.pop(peer.number, None)
        self._hasty.pop(peer.number, None)
        self._held_bytes -= peer.held_bytes
        self._selector.unregister(peer.socket)
        peer.socket.close()
        if peer.known:
            self._left(peer.number)
