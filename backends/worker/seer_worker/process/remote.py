"""A worker on another machine: ``python -P -m seer_worker.process.remote HOST PORT FD``.

It connects to its runtime; identity and key are read from the pipe ``FD``.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import sys

from seer_worker.handshake import (
    HANDSHAKE_S,
    ID_BYTES,
    KEY_BYTES,
    NONCE_BYTES,
    PROOF_BYTES,
    proof,
    proves,
    tune,
)
from seer_worker.process.child import configure_log, serve

__all__ = ["connect", "main"]


def connect(host: str, port: int, identity: bytes, key: bytes) -> socket.socket:
    """Return a connection to the runtime, each side's key proved; it blocks.

    Raises:
        OSError: the runtime cannot be reached, refuses this worker, or does not prove the key.
    """
    connection = socket.create_connection((host, port), timeout=HANDSHAKE_S)
    try:
        tune(connection)
        ours, theirs = secrets.token_bytes(NONCE_BYTES), _exactly(connection, NONCE_BYTES)
        connection.sendall(identity + ours + proof(key, worker=True, theirs=theirs, ours=ours))
        answer = _exactly(connection, PROOF_BYTES)
        if not proves(answer, key, worker=False, theirs=ours, ours=theirs):
            raise ConnectionError("it does not prove this worker's key")
        connection.settimeout(None)
    except BaseException:
        connection.close()
        raise
    return connection


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise ConnectionError("it refuses this worker")
        data += more
    return data


def main(host: str, port: int, fd: int) -> int:
    """Serve the runtime at that address; return the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    configure_log()
    with open(fd, "rb") as pipe:
        secret = pipe.read(ID_BYTES + KEY_BYTES)
    try:
        connection = connect(host, port, secret[:ID_BYTES], secret[ID_BYTES:])
    except OSError as error:
        print(f"no connection to the runtime at {host}, port {port}: {error}", file=sys.stderr)
        return 1
    return serve(connection)


if __name__ == "__main__":
    status = main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    sys.stdout.flush()
    os._exit(status)  # as a child process of the runtime does
