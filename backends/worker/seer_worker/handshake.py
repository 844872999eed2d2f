"""How a worker and its runtime recognise each other over TCP: both prove a key that never travels there.

The worker connects and gets a nonce.  It answers with its identity, a nonce of its own and an HMAC-SHA256 of
both under its key; the runtime answers with another one.  After that the stream carries the frames of
``seer_host.frames``.  Nothing is encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import socket

__all__ = ["HANDSHAKE_S", "ID_BYTES", "KEY_BYTES", "NONCE_BYTES", "PROOF_BYTES", "proof", "proves", "tune"]

ID_BYTES = KEY_BYTES = NONCE_BYTES = PROOF_BYTES = 32
HANDSHAKE_S = 10.0
"""How long either side waits for the other's part."""

WORKER, RUNTIME = b"worker", b"runtime"
IDLE_S, PROBE_S, PROBES = 5, 2, 5
GONE_MS = 15_000
"""A host that acknowledges nothing for so long is gone, with data under way or without."""


def proof(key: bytes, *, worker: bool, theirs: bytes, ours: bytes) -> bytes:
    """Return what one side sends for the other's nonce and its own."""
    return hmac.digest(key, (WORKER if worker else RUNTIME) + theirs + ours, hashlib.sha256)


def proves(given: bytes, key: bytes, *, worker: bool, theirs: bytes, ours: bytes) -> bool:
    """Return whether ``given`` is the proof of that side, in whose eyes the nonces are as in ``proof``."""
    return hmac.compare_digest(given, proof(key, worker=worker, theirs=theirs, ours=ours))


def tune(connection: socket.socket) -> None:
    """Send small messages at once, and notice a host that is gone without a word."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", IDLE_S),
        ("TCP_KEEPINTVL", PROBE_S),
        ("TCP_KEEPCNT", PROBES),
        ("TCP_USER_TIMEOUT", GONE_MS),
    ):
        if hasattr(socket, option):  # Linux has all of them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
