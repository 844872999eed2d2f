"""Gloo groups of one process: they have one thread together, and not one each that wakes 100 times a second.

Engines make a group for each way to spread a model, also where one process has all of it: vLLM 0.32 makes 13,
and SGLang 0.5.23 nine.  Gloo gives each a thread that looks for messages every ten milliseconds.  Thirteen of
them take 2 % of a core in an engine that does nothing.

Gloo also listens for connections as long as it lives, takes each one in, and ends the process if it may open
no more files.  Once a group is made all of its connections are there, so its sockets drop what comes later.
"""

from __future__ import annotations

import ctypes
import os
import socket
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache, wraps
from typing import Any

import torch.distributed

__all__ = ["share_thread"]

SO_ATTACH_FILTER = 26
LOOPBACK = "127.0.0.1"
RETURN = 0x06
"""BPF's instruction that ends a filter, with the number of bytes that are kept of the packet."""


@cache
def share_thread() -> None:
    """Let all groups of one process share a thread from now on, and no group take more connections in."""
    gloo: Any = torch.distributed.ProcessGroupGloo
    make = gloo.__init__

    @cache
    def device() -> Any:
        return gloo.create_device(hostname=LOOPBACK)  # no other process connects to it

    @wraps(make)
    def make_group(group: Any, store: Any, rank: int, size: int, *args: Any, **others: Any) -> None:
        timeout = others.get("timeout")
        if size > 1 and os.environ.get("TORCH_GLOO_LAZY_INIT"):  # its ranks connect when they send
            make(group, store, rank, size, *args, **others)
            return
        with _listening_only_within():
            if size == 1 and not args and isinstance(timeout, timedelta):
                options = gloo._Options()
                options._devices, options._threads, options._timeout = [device()], 1, timeout
                args, others = (options,), {}
            make(group, store, rank, size, *args, **others)

    gloo.__init__ = make_group


@contextmanager
def _listening_only_within() -> Iterator[None]:
    """Drop all packets that come to the listening sockets that are opened in the ``with`` block, after it."""
    before = set(os.listdir("/proc/self/fd"))
    yield
    code = ctypes.create_string_buffer(struct.pack("HBBI", RETURN, 0, 0, 0))
    program = struct.pack("HP", 1, ctypes.addressof(code))
    for name in set(os.listdir("/proc/self/fd")) - before:
        with suppress(OSError):  # closed by now, or the kernel has no filters
            if not stat.S_ISSOCK(os.stat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as opened:
                if opened.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    opened.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)
