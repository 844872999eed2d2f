"""Where a worker runs, measured there: its node, and the address at which other nodes reach it."""

from __future__ import annotations

import hashlib
import os
import socket
from contextlib import suppress
from functools import cache
from pathlib import Path

from seer_core.ports.kv import LOOPBACK

__all__ = ["device_kind", "node_name", "own_address"]

BOOT = Path("/proc/sys/kernel/random/boot_id")
PROCESSES = Path("/proc/self/ns/pid")


@cache
def node_name() -> str:
    """Return what stands for this node: processes of one node see each other in ``/proc``.

    It begins with the host's name, for people.  Containers of one machine are nodes of their own.
    """
    facts = []
    with suppress(OSError):
        facts.append(BOOT.read_text().strip())
    with suppress(OSError):
        facts.append(os.readlink(PROCESSES))
    host = socket.gethostname()
    return f"{host}-{hashlib.sha256(' '.join([host, *facts]).encode()).hexdigest()[:8]}"


def device_kind() -> str:
    """Return the kind of device on which this process computes; empty if other processes do that for it."""
    import torch  # takes seconds

    if not torch.cuda.is_available():
        return "cpu"
    return torch.cuda.get_device_name() if torch.cuda.is_initialized() else ""  # type: ignore[no-untyped-call]


def own_address(connection: socket.socket) -> str:
    """Return the address of this end of a connection: that of the network that leads to the runtime."""
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return LOOPBACK
    return str(connection.getsockname()[0])
