"""Child processes that never outlive the one that started them."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

__all__ = ["die_with"]

_PR_SET_PDEATHSIG = 1
"""Linux, prctl(2)."""


def die_with(parent_pid: int) -> None:
    """Ask Linux to kill this process when its parent dies, even by SIGKILL; call it first thing.

    Elsewhere the process must notice by itself.  Exits at once if the parent, ``parent_pid``, is dead.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit("the process that started this one died before it was up")
