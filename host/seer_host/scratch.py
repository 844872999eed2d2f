"""Scratch directories: removed by the process that made them, or by the next one if that was killed.

Shared memory that engines name after their directory, as vLLM's ranks on a CPU do, goes with it, and what a
process shares by ``multiprocessing`` after ``name_shared_memory``.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from contextlib import suppress
from multiprocessing import process, shared_memory
from pathlib import Path
from typing import Any

__all__ = ["Scratch", "name_shared_memory"]

LEFT_OVER_S = 60.0
"""Age from which an unlocked directory belongs to a process that was killed, and is not just being made."""
SHARED_MEMORY = Path("/dev/shm")
RANDOM_LETTERS = 16
"""At the end of a name in shared memory."""


class Scratch:
    """A directory at ``path`` that is locked while this process lives, or until it is closed."""

    def __init__(self, prefix: str, place: str | Path = "") -> None:
        """Make it in ``place``, by default the temporary directory; remove what killed processes left there.

        Raises:
            OSError: it cannot be made.
        """
        parent = Path(place or tempfile.gettempdir())
        parent.mkdir(parents=True, exist_ok=True)
        for other in parent.glob(f"{prefix}*"):
            with suppress(OSError):  # in use by another process, or gone
                status = other.lstat()
                if status.st_uid == os.getuid() and time.time() - status.st_mtime > LEFT_OVER_S:
                    os.close(_locked(other))
                    _remove(other)
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        self._lock: int | None = _locked(self.path)

    def close(self) -> None:
        """Remove the directory.  Idempotent."""
        if self._lock is not None:
            _remove(self.path)
            os.close(self._lock)
            self._lock = None


def name_shared_memory(directory: Path) -> None:
    """Name shared memory and semaphores of ``multiprocessing`` so that they go with a scratch directory.

    This holds for all that this process makes from now on, and its forks, and for semaphores of processes
    that it starts anew.  Python names them at random, and they outlive a process that is killed together
    with the one that Python has for cleaning up.
    """
    memory: Any = shared_memory
    memory._SHM_NAME_PREFIX = f"/{directory.name}-"
    memory._SHM_SAFE_NAME_LENGTH = len(memory._SHM_NAME_PREFIX) + RANDOM_LETTERS
    this: Any = process.current_process()
    this._config["semprefix"] = f"/{directory.name}"


def _remove(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    for pattern in (f"{directory.name}-*", f"sem.{directory.name}-*"):
        for memory in SHARED_MEMORY.glob(pattern):
            with suppress(OSError):  # another user's, or a directory
                memory.unlink()


def _locked(directory: Path) -> int:
    """Lock a directory and return its descriptor; raise BlockingIOError if another process holds the lock."""
    lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise
    return lock
