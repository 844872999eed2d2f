"""A process that holds the directory of a run, and removes it when the run ends, killed or not.

``python -I cleanup.py DIRECTORY``: remove what killed runs have left, make DIRECTORY, and remove it when
standard input ends, which it does when the runtime is killed.  The file imports nothing of Seer, so that it
starts quickly.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
import time
from pathlib import Path

PREFIX = "seer-mooncake-"


def main(directory: Path) -> None:
    """Hold the directory until standard input ends."""
    sweep(directory.parent)
    claim(directory)
    while os.read(0, 1):
        pass
    remove(directory)


def claim(directory: Path) -> None:
    """Make a directory and lock it until this process ends, though another one may sweep it in between."""
    while True:
        directory.mkdir(0o700, parents=True, exist_ok=True)
        try:
            lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.fstat(lock).st_nlink:
            return
        os.close(lock)


def sweep(root: Path) -> None:
    """Remove directories of runs that were killed together with their cleanup; only what such a run made.

    All users may write where temporary files go: an entry of such a name that is no directory, belongs to
    another user, or is gone because another cleanup sweeps too, is left alone.
    """
    for left in root.glob(PREFIX + "*"):
        try:
            fd = os.open(left, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            continue
        try:
            if os.fstat(fd).st_uid == os.geteuid():
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # else its run is alive, or it is being swept
                remove(left)
        except BlockingIOError:
            pass
        finally:
            os.close(fd)


def remove(directory: Path) -> None:
    """Remove a directory in which a dying process may still be writing."""
    for _ in range(20):
        shutil.rmtree(directory, ignore_errors=True)
        if not directory.exists():
            return
        time.sleep(0.1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
