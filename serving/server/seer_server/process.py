"""The process of the server: its connections within the limit of open files, and its end by a signal."""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import uvicorn

__all__ = ["OrderlyServer"]

SPARE_FILES = 64
"""Of the files that may be open, those for engines and logs, and for what comes between two looks at the
connections.
"""

HANG_UP_S = 10.0
"""In which answers end whose connections are closed; uvicorn then cancels the rest, with a traceback each."""


class OrderlyServer(uvicorn.Server):
    """Makes room for new connections, and ends its engines in order, however many signals arrive."""

    def __init__(
        self, config: uvicorn.Config, files: int, drain_s: float, started: Callable[[], None]
    ) -> None:
        """Take uvicorn's settings, how many files may be open, and what to call once clients are served.

        After a signal responses have ``drain_s`` seconds to end.
        """
        config.timeout_graceful_shutdown = math.ceil(drain_s + HANG_UP_S)
        super().__init__(config)
        logging.getLogger("uvicorn.error").addFilter(_is_of_the_server)
        self._drain_s = drain_s
        self._when_started = started
        self._most_connections = max(1, files - SPARE_FILES)
        self._idle: set[object] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the engines, listen, and say so."""
        await super().startup(sockets)
        if self.started:
            self._when_started()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take SIGHUP as uvicorn takes SIGTERM: a terminal that closes ends the server in order."""
        with super().capture_signals():
            before = signal.getsignal(signal.SIGHUP)
            if threading.current_thread() is not threading.main_thread() or before is signal.SIG_IGN:
                yield
                return
            signal.signal(signal.SIGHUP, self.handle_exit)
            try:
                yield
            finally:
                signal.signal(signal.SIGHUP, before)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let responses end, and hang up on the clients of those that have not in time."""
        drained = asyncio.get_running_loop().call_later(self._drain_s, self._hang_up)
        try:
            await super().shutdown(sockets)
        finally:
            drained.cancel()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Take a signal: the first one lets responses end, another one gives them up."""
        if self.should_exit:
            for server in self.servers[:1]:
                server.get_loop().call_soon_threadsafe(self._hang_up)
        super().handle_exit(sig, frame)
        self.force_exit = False  # or the engines would not be stopped

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: where connections run out, close idle ones."""
        over = len(self.server_state.connections) - self._most_connections
        idle = {each for each in self.server_state.connections if _is_idle(each)} if over > 0 else set()
        for connection in list(idle & self._idle)[: max(0, over)]:  # others may be about to ask
            connection.transport.close()
        self._idle = set(idle)
        return await super().on_tick(counter)

    def _hang_up(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def _is_idle(connection: object) -> bool:
    cycle = getattr(connection, "cycle", None)
    return cycle is None or cycle.response_complete


def _is_of_the_server(record: logging.LogRecord) -> bool:
    """Return whether a line of uvicorn's is no complaint about the bytes of a client, who may send many."""
    return record.levelno != logging.WARNING or "protocols" not in Path(record.pathname).parts
