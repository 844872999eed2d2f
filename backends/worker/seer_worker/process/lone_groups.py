"""Gloo groups of one process: they have one thread together, and not one each that wakes 100 times a second.

Engines make a group for each way to spread a model, also where one process has all of it: vLLM 0.32 makes 13,
and SGLang 0.5.23 nine.  Gloo gives each a thread that looks for messages every ten milliseconds.  Thirteen of
them take 2 % of a core in an engine that does nothing.
"""

from __future__ import annotations

from datetime import timedelta
from functools import cache, wraps
from typing import Any

import torch.distributed

__all__ = ["share_thread"]


@cache
def share_thread() -> None:
    """Let all groups of one process share a thread from now on; others are made as before."""
    gloo: Any = torch.distributed.ProcessGroupGloo
    make = gloo.__init__

    @cache
    def device() -> Any:
        return gloo.create_device(hostname="127.0.0.1")  # no other process connects to it

    @wraps(make)
    def make_group(group: Any, store: Any, rank: int, size: int, *args: Any, **others: Any) -> None:
        timeout = others.get("timeout")
        if size == 1 and not args and isinstance(timeout, timedelta):
            options = gloo._Options()
            options._devices, options._threads, options._timeout = [device()], 1, timeout
            args, others = (options,), {}
        make(group, store, rank, size, *args, **others)

    gloo.__init__ = make_group
