"""A worker's life: the start message, the engine, and a loop over messages and steps until the end."""

from __future__ import annotations

import select
import socket
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import structlog
from msgspec import structs
from seer_host.frames import Frames, WireError, encode
from seer_host.scratch import name_shared_memory

from seer_core.errors import ConfigError, EngineError
from seer_core.model import InstanceInfo
from seer_core.ports.kv import StoreSpec
from seer_worker.process.adapter import ADAPTER, EngineAdapter
from seer_worker.process.drafts import check_source
from seer_worker.process.place import node_name, own_address
from seer_worker.process.place_checks import check_place
from seer_worker.process.worker import Worker
from seer_worker.tokenizer.library import read
from seer_worker.wire import (
    Degraded,
    Fatal,
    FromWorker,
    ReadTokenizer,
    Ready,
    Shutdown,
    Start,
    TokenizerRead,
    ToWorker,
)

__all__ = ["Link", "work"]

log = structlog.get_logger("seer")

TRACEBACK_LINES = 12


class Link:
    """The worker's end of the socket, blocking."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._frames: Frames[ToWorker] = Frames(ToWorker)

    def send(self, *messages: FromWorker) -> None:
        """Send messages, in order.

        Raises:
            EOFError: the runtime is gone.
        """
        if messages:
            data = b"".join(map(encode, messages))
            try:
                self._socket.sendall(data)
            except OSError as error:
                raise EOFError(f"the connection to the runtime broke: {error}") from error

    def send_last(self, reason: str) -> None:
        """Send why the worker ends, if the runtime is still there."""
        with suppress(EOFError):
            self.send(Fatal(reason))

    def receive(self, *, wait: bool) -> list[ToWorker]:
        """Return every message that has arrived; with ``wait``, at least some bytes' worth.

        Raises:
            EOFError: the runtime is gone.
        """
        messages: list[ToWorker] = []
        while wait or select.select([self._socket], [], [], 0)[0]:
            try:
                data = self._socket.recv(1 << 20)
            except OSError as error:  # also a TimeoutError, of TCP to a host that is gone
                raise EOFError(f"the connection to the runtime broke: {error}") from error
            if not data:
                raise EOFError("the runtime closed the connection")
            messages += self._frames.feed(data)
            wait = False
        return messages


def work(connection: socket.socket, before_close: Callable[[], object] = lambda: None) -> int:
    """Serve the runtime at the other end; return the exit status.

    ``before_close`` is called once there is nothing left to do but to close the engine.
    """
    link = Link(connection)
    adapter: EngineAdapter | None = None
    worker: Worker | None = None
    try:
        start, *early = link.receive(wait=True)
        if isinstance(start, ReadTokenizer) and not early:
            reading = read(Path(start.model_dir), start.trust_remote_code, start.textual)
            link.send(TokenizerRead(reading))
            return 0
        if not isinstance(start, Start) or early:
            raise WireError("the first message must be Start, alone")
        check_place(start)
        name_shared_memory(Path(start.scratch))
        if start.source is not None:
            check_source(start.source, start.own_methods)  # the engine's import takes seconds
        make: Any = ADAPTER.load(start.instance)
        start = structs.replace(start, address=own_address(connection))
        adapter = make(start)
        worker = Worker(link.send, adapter, start)
        if not getattr(adapter, "emulated", False):
            from seer_worker.sampling import selftest  # imports torch, which takes seconds

            selftest.check_keyed(worker)
            if (reason := selftest.continued_otherwise(worker)) is not None:
                link.send(Degraded("continuation", reason))
        link.send(*worker.notes(), Ready(_placed(worker.info, start.store), worker.measured))
        _loop(link, worker)
    except EOFError:
        return 0
    except (ConfigError, EngineError, WireError) as error:
        link.send_last(str(error))
        return 1
    except Exception:
        tail = traceback.format_exc().splitlines()[-TRACEBACK_LINES:]
        log.exception("worker_failed")
        link.send_last("\n".join(tail))
        return 1
    finally:
        before_close()
        closing = worker or adapter
        if closing is not None:
            closing.close()
    return 0


def _loop(link: Link, worker: Worker) -> None:
    """Work until the runtime sends ``Shutdown``."""
    while True:
        for message in link.receive(wait=not worker.busy):
            if isinstance(message, Shutdown):
                return
            worker.handle(message)
        if worker.busy:
            worker.step()


def _placed(info: InstanceInfo, store: StoreSpec | None) -> InstanceInfo:
    """Return the info with the node that this process runs on, and how far its KV reaches."""
    node = node_name()
    confined = store is not None and not store.spans_nodes
    return structs.replace(info, node=node, kv_reach=node if confined else "")
