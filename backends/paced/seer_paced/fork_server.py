"""A process that has imported SGLang once, and forks one for each emulated instance on a virtual clock.

``python -P -m seer_paced.fork_server FD`` takes sockets by ``FD``, and forks for each of them.
"""

from __future__ import annotations

import atexit
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module

from seer_host.json_files import describe_flaw
from seer_host.process import ChildProcess, log_tail
from seer_worker.process.child import configure_log

from seer_core.errors import EngineError

__all__ = ["StepperServer", "fork_server", "main"]

_servers: dict[str, StepperServer] = {}


class StepperServer:
    """The process, and where it takes sockets.

    Raises:
        EngineError: the interpreter cannot be run.
    """

    def __init__(self, interpreter: str, environment: Mapping[str, str]) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the process
        self._control, theirs = socket.socketpair()
        # -P: nothing is imported from where it runs
        command = (interpreter, "-P", "-m", "seer_paced.fork_server", str(theirs.fileno()))
        try:
            with theirs:
                self._process = ChildProcess(
                    command, environment=environment, log=self._log, pass_fds=[theirs.fileno()]
                )
        except OSError as error:
            self._control.close()
            self._log.close()
            raise EngineError(
                f"{interpreter} cannot be run: {describe_flaw(error)}; correct python in"
                " [engine.paced.worker]"
            ) from error
        atexit.register(self.close)

    @property
    def alive(self) -> bool:
        """Whether the process lives."""
        return self._process.wait(0.0) is None

    def connect(self) -> socket.socket:
        """Return a socket at whose other end ``remote_stepper.serve`` runs, as soon as SGLang is imported."""
        ours, theirs = socket.socketpair()
        with theirs, suppress(OSError):  # a dead process closes it, which a read of ours shows
            socket.send_fds(self._control, [b"."], [theirs.fileno()])
        return ours

    def last_words(self) -> str:
        """Return the last line that was written where its processes write."""
        return next((line for line in reversed(log_tail(self._log)) if line.strip()), "")

    def close(self) -> None:
        """End the process, and its instances with it."""
        atexit.unregister(self.close)
        self._process.kill()
        self._process.end()
        self._control.close()
        self._log.close()


def fork_server(interpreter: str, environment: Mapping[str, str]) -> StepperServer:
    """Return this process's fork server for an interpreter; environment is for one that has to be made."""
    found = _servers.pop(interpreter, None)
    if found is not None and not found.alive:
        found.close()
        found = None
    _servers[interpreter] = found = found or StepperServer(interpreter, environment)
    return found


def main(fd: int) -> None:
    """Import SGLang, and fork for each socket that comes by ``fd``, until that is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    configure_log()
    from seer_paced import remote_stepper

    _import_sglang()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # they are not waited for
    control = socket.socket(fileno=fd)
    while True:
        data, fds, *_ = socket.recv_fds(control, 1, 1)
        if not data:
            return
        if os.fork() == 0:
            control.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            # The alarm ends a process that hangs.
            remote_stepper.serve(socket.socket(fileno=fds[0]), signal.alarm)
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
    main(int(sys.argv[1]))
