"""Ports for servers that are given a number and open it later, which no one else takes meanwhile."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["reserved_port"]


@contextmanager
def reserved_port(host: str = "127.0.0.1") -> Iterator[int]:
    """Yield a port that refuses connections until a server of ours listens at it.

    Linux gives it to no other socket that asks for a free port while this one is bound to it; a server binds
    to it as well if it sets SO_REUSEADDR, as nearly all do.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((host, 0))
        yield held.getsockname()[1]
