"""How a draft server and a client meet: each proves that it knows the token, and neither tells it.

The server greets with a nonce.  The client says hello with one of its own and a proof, a keyed digest of both
nonces; the server welcomes it with another proof, or says why not.  All three have a fixed length, so whoever
does not know the token can make a server hold a few bytes, and an impostor on its port learns nothing.
What follows is neither encrypted nor signed: a network between the two must be one to trust.
"""

from __future__ import annotations

import hashlib
import hmac
import os

import attrs

from seer_grouped_spec.wire import WireError

__all__ = [
    "GREETING_BYTES",
    "HELLO_BYTES",
    "PROTOCOL_VERSION",
    "TOKEN_VARIABLE",
    "WELCOME_BYTES",
    "WRONG_TOKEN",
    "Handshake",
    "Unwelcome",
]

PROTOCOL_VERSION = 2
MAGIC = b"SDG" + PROTOCOL_VERSION.to_bytes(2, "big")
NONCE_BYTES = 32
PROOF_BYTES = 32
GREETING_BYTES = len(MAGIC) + NONCE_BYTES
HELLO_BYTES = GREETING_BYTES + PROOF_BYTES
WELCOME_BYTES = 1 + PROOF_BYTES

TOKEN_VARIABLE = "SEER_DRAFT_TOKEN"
"""Environment variable that gives a server its token."""

WRONG_TOKEN = "the token is wrong or missing"


class Unwelcome(WireError):
    """The other side is not what was looked for, or does not know the token."""


@attrs.define(eq=False)
class Handshake:
    """One side of one meeting; ``nonce`` is its own."""

    token: bytes
    nonce: bytes = attrs.field(factory=lambda: os.urandom(NONCE_BYTES))
    theirs: bytes = b""

    def greeting(self) -> bytes:
        """Return what a server says first."""
        return MAGIC + self.nonce

    def hello(self, greeting: bytes) -> bytes:
        """Return what a client answers, or raise ``Unwelcome``."""
        self.theirs = _nonce(greeting)
        return MAGIC + self.nonce + self._proof(b"client", self.theirs, self.nonce)

    def welcome(self, hello: bytes) -> bytes:
        """Return what a server answers, or raise ``Unwelcome``, whose answer is ``refusal()``."""
        theirs = _nonce(hello[:GREETING_BYTES])
        if not hmac.compare_digest(hello[GREETING_BYTES:], self._proof(b"client", self.nonce, theirs)):
            raise Unwelcome(WRONG_TOKEN)
        return b"\1" + self._proof(b"server", self.nonce, theirs)

    @staticmethod
    def refusal() -> bytes:
        """Return what a server answers to whom it does not welcome."""
        return bytes(WELCOME_BYTES)

    def welcomed(self, welcome: bytes) -> None:
        """Check a server's answer, or raise ``Unwelcome``."""
        if welcome == self.refusal():
            raise Unwelcome(WRONG_TOKEN)
        if not hmac.compare_digest(welcome, b"\1" + self._proof(b"server", self.theirs, self.nonce)):
            raise Unwelcome("it does not know the token itself")

    def _proof(self, who: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
        return hmac.digest(self.token, who + server_nonce + client_nonce, hashlib.sha256)


def _nonce(greeting: bytes) -> bytes:
    if greeting[:3] != MAGIC[:3]:
        raise Unwelcome("it speaks another protocol")
    if greeting[: len(MAGIC)] != MAGIC:
        version = int.from_bytes(greeting[3 : len(MAGIC)], "big")
        raise Unwelcome(f"it speaks protocol version {version}; this side speaks {PROTOCOL_VERSION}")
    return greeting[len(MAGIC) :]
