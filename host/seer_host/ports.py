"""Ports for servers that are given a number and open it later, which no one else takes meanwhile."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["reserved_port"]


@contextmanager
def reserved_port() -> Iterator[int]:
    """Yield a port that refuses connections until a server of ours listens at it.

    It is free at all addresses of the machine, since servers such as torch's open it at all of them.  Linux
    gives it to no other socket that asks for a free port while this one is bound to it; a server binds to it
    as well if it sets SO_REUSEADDR, as nearly all do.
    """
    dual = socket.has_dualstack_ipv6()
    with socket.socket(socket.AF_INET6 if dual else socket.AF_INET) as held:
        if dual:
            held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("::" if dual else "0.0.0.0", 0))
        yield held.getsockname()[1]
