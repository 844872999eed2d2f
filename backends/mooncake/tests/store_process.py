"""A store in a process of its own, as an instance's is.

Mooncake's client cannot be ended once its master is gone: it asks for it while its process lives, and
its end would hold Python's global lock.  So the stores of a test end with their processes.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from seer_mooncake.store import MooncakeStore

from seer_core.ports.kv import Bytes, StoreContext

__all__ = ["StoreProcess"]

MAIN = "from backends.mooncake.tests.store_process import serve; serve()"


class StoreProcess:
    """Has the methods of a ``MooncakeStore``, all of which run in the process."""

    def __init__(
        self,
        settings: Mapping[str, Any],
        instance: str,
        block_bytes: int,
        report: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """Start it, and wait until it has its store."""
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-c", MAIN, str(theirs.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        self._line: Connection[Any, Any] = Connection(ours.detach())
        self._report = report
        self.ended = False
        self._ask(dict(settings), instance, block_bytes)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *arguments: self._ask(name, *arguments)

    def get(self, keys: list[bytes], blocks: Bytes) -> int:
        """Copy blocks from the process."""
        count, found = self._ask("get", keys, blocks.shape)
        blocks[:count] = found
        return int(count)

    def end(self) -> None:
        """End the process as an instance's ends."""
        self.ended = True
        self._line.close()
        self._process.kill()
        self._process.wait()

    def _ask(self, *words: Any) -> Any:
        self._line.send(words)
        while True:
            kind, value = self._line.recv()
            if kind == "answer":
                return value
            self._report(value)


def serve() -> None:
    """Serve what the other end of the socket asks for."""
    line: Connection[Any, Any] = Connection(int(sys.argv[1]))
    settings, instance, block_bytes = line.recv()
    report = lambda reason: line.send(("report", reason))  # noqa: E731
    store = MooncakeStore(settings, StoreContext(instance, block_bytes, 32, report))
    line.send(("answer", None))
    while True:
        name, *arguments = line.recv()
        if name == "get":
            keys, shape = arguments
            blocks = np.zeros(shape, np.uint8)
            count = store.get(keys, blocks)
            answer: Any = count, blocks[:count]
        elif name == "wait_at_most":
            store._client._timeout_s = arguments[0]
            answer = None
        else:
            answer = getattr(store, name)(*arguments)
        line.send(("answer", answer))
