"""A process that has imported SGLang once, and forks one for each paced instance on a virtual clock.

``python -P -m seer_paced.sglang_nursery FD PARENT_PID`` takes sockets by ``FD``, and forks for each of them.
"""

from __future__ import annotations

import atexit
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module

from seer_host.child import configure_log, die_with

from seer_core.errors import EngineError
from seer_core.reading import flaw

__all__ = ["Nursery", "main", "nursery"]

LAST_WORDS_BYTES = 1000

_nurseries: dict[str, Nursery] = {}


class Nursery:
    """The process, and where it takes sockets.

    Raises:
        EngineError: the interpreter cannot be run.
    """

    def __init__(self, interpreter: str, environment: Mapping[str, str]) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the process
        self._control, theirs = socket.socketpair()
        arguments = ("seer_paced.sglang_nursery", str(theirs.fileno()), str(os.getpid()))
        try:
            with theirs:
                self._process = subprocess.Popen(
                    (interpreter, "-P", "-m", *arguments),  # -P: nothing is imported from where it runs
                    stdin=subprocess.DEVNULL,
                    stdout=self._log,
                    stderr=self._log,
                    env=dict(environment),
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                )
        except OSError as error:
            self._control.close()
            self._log.close()
            raise EngineError(
                f"{interpreter} cannot be run: {flaw(error)}; correct python in [engine.paced]"
            ) from error
        atexit.register(self.close)

    @property
    def alive(self) -> bool:
        """Whether the process lives."""
        return self._process.poll() is None

    def connect(self) -> socket.socket:
        """Return a socket at whose other end ``lockstep.serve`` runs, as soon as SGLang is imported."""
        ours, theirs = socket.socketpair()
        with theirs, suppress(OSError):  # a dead process closes it, which ours says
            socket.send_fds(self._control, [b"."], [theirs.fileno()])
        return ours

    def last_words(self) -> str:
        """Return the last line that was written where processes of the nursery write."""
        end = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, end - LAST_WORDS_BYTES))
        return self._log.read().decode(errors="replace").rstrip().rpartition("\n")[2]

    def close(self) -> None:
        """End the process, and its instances with it."""
        atexit.unregister(self.close)
        self._process.kill()
        self._process.wait()
        self._control.close()
        self._log.close()


def nursery(interpreter: str, environment: Mapping[str, str]) -> Nursery:
    """Return this process's nursery for an interpreter; environment is for one that has to be made."""
    found = _nurseries.pop(interpreter, None)
    if found is not None and not found.alive:
        found.close()
        found = None
    _nurseries[interpreter] = found = found or Nursery(interpreter, environment)
    return found


def main(fd: int, parent_pid: int) -> None:
    """Import SGLang, and fork for each socket that comes by ``fd``, until that is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with(parent_pid)
    configure_log()
    from seer_paced import lockstep

    _import_sglang()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    control, pid = socket.socket(fileno=fd), os.getpid()
    while True:
        data, fds, *_ = socket.recv_fds(control, 1, 1)
        if not data:
            return
        if os.fork() == 0:
            control.close()
            die_with(pid)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            lockstep.serve(socket.socket(fileno=fds[0]), signal.alarm)  # which ends a process that hangs
            os._exit(0)
        os.close(fds[0])


def _import_sglang() -> None:
    """Import what an instance will need, of which SGLang has much that it imports late."""
    from seer_sglang import internals

    internals.check_kernels()
    internals.check_imports()
    for module in ("seer_paced.sglang_forward", "seer_sglang.cache", "sglang.srt.models.registry"):
        import_module(module)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
