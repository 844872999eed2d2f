"""New weights on their way to nodes: once to each node, for all its workers that load them at a time.

They travel by TCP to the runtime's one port, like everything but launches, logs and ends: Ray's object store
is slower, and takes a copy of its own on both sides.  A node holds them only while workers load them.  One
whose worker starts later asks again, for the runtime's machine has them until the next update.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import attrs
import msgspec
import ray
import structlog
from seer_host.json_files import describe_flaw
from seer_host.threads import in_thread
from seer_host.weight_copies import NONCE, digest_of_files, weight_files
from seer_worker.client.worker_port import WorkerPort

from seer_core.error_origin import one_line
from seer_core.errors import EngineError
from seer_core.ports.weights import DIRECTORY, SHARED_MEMORY, WeightSpec
from seer_ray.keeper import SILENCE_S, Cargo, Fetched
from seer_ray.supervisor import Started

__all__ = ["Delivery", "NodeWeights", "cargo_of", "paths_of", "send_files"]

log = structlog.get_logger("seer")

SLOWEST_BYTES_PER_S = 2e7
"""The rate below which a transfer is given up."""
LAST_WORD_S = 10.0
"""How long a node may take to answer once the transfer has broken off."""
ENCRYPTED_BYTES = 1 << 20
"""How much is encrypted at a time."""


@attrs.define(eq=False)
class Delivery:
    """Weights that are brought to a node, and how many workers there want them."""

    task: asyncio.Task[WeightSpec]
    key: str
    supervisor: Any
    users: int = 0


class NodeWeights:
    """Brings weights of this machine to nodes; ``limit_s`` bounds each step beside the transfer itself."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._deliveries: dict[tuple[str, str], Delivery] = {}

    @asynccontextmanager
    async def on_node(
        self, source: WeightSpec, started: Started, supervisor: Any, port: WorkerPort
    ) -> AsyncIterator[WeightSpec]:
        """Yield what names the weights on a worker's node, by this supervisor or by one that is about to.

        Raises:
            EngineError: they cannot get there.
        """
        if source.path not in (DIRECTORY, SHARED_MEMORY):
            yield source
            return
        place = started.node_id, msgspec.json.encode(source).decode()
        while True:
            delivery = self._deliveries.get(place)
            own = delivery is None
            if delivery is None:
                key = secrets.token_hex(8)
                task = asyncio.create_task(self._deliver(key, source, started, supervisor, port))
                delivery = self._deliveries[place] = Delivery(task, key, supervisor)
            delivery.users += 1
            try:
                try:
                    local = await asyncio.shield(delivery.task)
                except EngineError:
                    self._forget(place, delivery)
                    if own:
                        raise
                    continue  # by this worker's own supervisor, which need not have ended with the other
                yield local
                return
            finally:
                delivery.users -= 1
                if not delivery.users:
                    self._forget(place, delivery)
                    delivery.task.cancel()
                    _behind(delivery.supervisor.free_weights.remote, delivery.key)

    def _forget(self, place: tuple[str, str], delivery: Delivery) -> None:
        if self._deliveries.get(place) is delivery:
            del self._deliveries[place]

    async def _deliver(
        self, key: str, source: WeightSpec, started: Started, supervisor: Any, port: WorkerPort
    ) -> WeightSpec:
        """Bring weights to a node unless it has them; return what names them there."""
        cargo = await asyncio.to_thread(cargo_of, source)
        if cargo is None:
            return source
        begun_s = time.monotonic()
        limit_s = self._limit_s + cargo.size_bytes / SLOWEST_BYTES_PER_S
        try:
            if await _answer(limit_s, supervisor.hosts_weights.remote, msgspec.to_builtins(cargo)):
                return source
            place = await self._transfer(key, cargo, supervisor, port, limit_s)
        except (OSError, EngineError) as error:  # a TimeoutError is an OSError
            flaw = describe_flaw(error) if isinstance(error, OSError) else str(error)
            raise EngineError(
                f"the weights did not reach node {started.host}: {flaw or 'the transfer took too long'}"
            ) from error
        seconds = round(time.monotonic() - begun_s, 3)
        log.info("weights_sent", node=started.host, bytes=cargo.size_bytes, seconds=seconds)
        if cargo.kind == DIRECTORY:
            return WeightSpec(source.path, {**source.settings, "directory": place, "digest": cargo.digest})
        return WeightSpec(source.path, {**source.settings, "area": place})

    async def _transfer(
        self, key: str, cargo: Cargo, supervisor: Any, port: WorkerPort, limit_s: float
    ) -> str:
        """Send weights to a supervisor that connects for them; return where it keeps them."""
        expected = port.expect()
        asked = key, msgspec.to_builtins(cargo), (port.host, port.port), expected.secret
        fetching = asyncio.create_task(_answer(limit_s, supervisor.fetch_weights.remote, *asked))
        sending: asyncio.Task[None] | None = None
        try:
            first: set[asyncio.Future[Any]] = {expected.streams, fetching}
            await asyncio.wait(first, timeout=self._limit_s, return_when=asyncio.FIRST_COMPLETED)
            if expected.streams.done():
                _, writer = expected.streams.result()
                sending = asyncio.create_task(send_files(writer, paths_of(cargo), limit_s))
                await asyncio.wait({sending, fetching}, return_when=asyncio.FIRST_COMPLETED)
                if sending.done() and sending.exception() is not None:
                    # The other end may have closed the connection, and its answer says why.
                    await asyncio.wait({fetching}, timeout=LAST_WORD_S)
                    if not fetching.done():
                        sending.result()
            elif not fetching.done():
                raise EngineError(
                    f"it has not connected to {port.host}, port {port.port}, within {self._limit_s:g} s"
                )
            fetched = Fetched(**await fetching)
        finally:
            tasks = [fetching] if sending is None else [fetching, sending]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            port.forget(expected)
        if fetched.flaw:
            raise EngineError(fetched.flaw)
        return fetched.place


def cargo_of(source: WeightSpec) -> Cargo | None:
    """Return what is to be sent; None for a directory without safetensors, which an engine must judge.

    Raises:
        EngineError: the weights cannot be read here.
    """
    settings = source.settings
    try:
        if source.path == SHARED_MEMORY:
            place = settings["area"]
            files, nonce = {"weights": os.stat(place).st_size}, ""
            digest, table = settings["digest"], msgspec.to_builtins(settings["table"])
        else:
            place = settings["directory"]
            paths = weight_files(Path(place))
            if not paths:
                return None
            files = {path.name: path.stat().st_size for path in paths}
            mark = Path(place, NONCE)
            nonce = mark.read_text() if mark.exists() else ""
            digest, table = settings.get("digest") or digest_of_files(paths), []
    except OSError as error:
        raise EngineError(
            f"the weights in {str(source)!r} cannot be read on the runtime's machine: {describe_flaw(error)};"
            " shared memory must be that of a process there, which is alive and of the runtime's user"
        ) from error
    return Cargo(source.path, place, digest, nonce, files, table)


async def send_files(writer: asyncio.StreamWriter, paths: Sequence[str], limit_s: float) -> None:
    """Send files one after another; what the writer has sent already must be on its way."""
    if writer.get_extra_info("ssl_object") is None:
        descriptor = os.dup(writer.get_extra_info("socket").fileno())
        await in_thread(limit_s, _send, socket.socket(fileno=descriptor), paths)
        return
    async with asyncio.timeout(limit_s):
        for path in paths:
            with open(path, "rb", buffering=0) as file:
                while data := await asyncio.to_thread(file.read, ENCRYPTED_BYTES):
                    writer.write(data)
                    await writer.drain()


def _send(connection: socket.socket, paths: Sequence[str]) -> None:
    """Send files from the kernel's own pages."""
    with connection:
        connection.settimeout(SILENCE_S)
        for path in paths:
            with open(path, "rb", buffering=0) as file:
                connection.sendfile(file)


def paths_of(cargo: Cargo) -> Sequence[str]:
    """Return the files to send, in order."""
    if cargo.kind == DIRECTORY:
        return [os.path.join(cargo.place, name) for name in cargo.files]
    return [cargo.place]


async def _answer(limit_s: float, call: Any, *arguments: Any) -> Any:
    """Return what a supervisor answers.

    Raises:
        EngineError: it is gone, or does not answer.
    """
    try:
        return await in_thread(limit_s, lambda: ray.get(call(*arguments), timeout=limit_s))
    except Exception as error:
        raise EngineError(
            f"its supervisor gives no answer ({type(error).__name__}: {one_line(error)})"
        ) from error


def _behind(call: Any, *arguments: Any) -> None:
    """Call a supervisor that may be gone, and wait for nothing."""

    def run() -> None:
        with suppress(Exception):
            call(*arguments)

    threading.Thread(target=run, name="seer-ray", daemon=True).start()
