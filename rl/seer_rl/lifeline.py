"""How a process ends with the one that started it, SIGKILL included."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import sys

__all__ = ["end_with_parent"]


def end_with_parent(alive: int) -> None:
    """Have Linux kill this process and what it has started when its parent closes the other end of a pipe.

    The parent must have given it a process group of its own.  It needs no Python, which may be held up for
    hours: by a regular expression that backtracks, say.  A parent-death signal would not reach what this
    process has started.
    """
    os.set_inheritable(alive, False)
    if sys.platform == "linux":
        fcntl.fcntl(alive, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(alive, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(alive, fcntl.F_SETFL, os.O_ASYNC)
    if select.select([alive], [], [], 0)[0]:  # it was closed before: that gives no signal any more
        os.killpg(0, signal.SIGKILL)
