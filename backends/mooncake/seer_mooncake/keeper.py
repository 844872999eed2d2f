"""Keep a master running, and see to it that nothing is left of a run, however that ends.

``python -I keeper.py DIRECTORY COMMAND...``: make DIRECTORY (none if empty), run COMMAND (none if empty) and
start it again when it ends.  When standard input ends, which it does when the runtime is killed, kill the one
and remove the other.  Says on standard output what it did.  A file of its own that imports nothing of ours,
so that it starts quickly.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

PREFIX = "seer-mooncake-"
PR_SET_PDEATHSIG = 1
RESTARTS = 10
RESTART_PAUSE_S = 0.5


class Keeper:
    """One process kept, until standard input ends."""

    def __init__(self, command: list[str]) -> None:
        self._command = command
        self._lock = threading.Lock()
        self._over = False
        self._child = self._start()

    def keep(self) -> None:
        """Return when standard input has ended, or the process too often."""
        threading.Thread(target=self._wait_for_the_end, daemon=True).start()
        for restart in range(RESTARTS + 1):
            status = self._child.wait()
            if self._over:
                return
            say(f"ended {status} {RESTARTS - restart}")
            time.sleep(RESTART_PAUSE_S)
            with self._lock:
                if self._over or restart == RESTARTS:
                    return
                self._child = self._start()
                say(f"started {self._child.pid}")

    def _start(self) -> subprocess.Popen[bytes]:
        parent = os.getpid()
        return subprocess.Popen(
            self._command, stdin=subprocess.DEVNULL, stdout=sys.stderr, preexec_fn=lambda: die_with(parent)
        )

    def _wait_for_the_end(self) -> None:
        while os.read(0, 1):
            pass
        with self._lock:
            self._over = True
            self._child.kill()


def main(directory: str, command: list[str]) -> None:
    """Keep, then remove the directory."""
    if directory:
        sweep(Path(directory).parent)
        claim(Path(directory))
    if command:
        Keeper(command).keep()
    while os.read(0, 1):
        pass
    if directory:
        remove(Path(directory))


def say(what: str) -> None:
    """Tell the runtime, if it still listens."""
    try:
        print(what, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def claim(directory: Path) -> None:
    """Make a directory and lock it until this process ends, though somebody may sweep it in between."""
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
    """Remove directories of runs that were killed together with their keeper; only what such a run made.

    Everybody may write where temporary files go: what has such a name and is no directory, or another
    user's, or gone meanwhile because another keeper sweeps too, is left alone.
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
    main(sys.argv[1], sys.argv[2:])
