"""The one port at which workers on other machines connect to the runtime."""

from __future__ import annotations

import asyncio
import secrets
import socket

import attrs

from seer_worker.handshake import (
    HANDSHAKE_S,
    ID_BYTES,
    KEY_BYTES,
    NONCE_BYTES,
    PROOF_BYTES,
    proof,
    proves,
    tune,
)

__all__ = ["ExpectedWorker", "WorkerPort"]

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@attrs.frozen(eq=False)
class ExpectedWorker:
    """A worker that is about to connect: the secret that it is given, and its streams once it has come."""

    identity: bytes
    key: bytes
    streams: asyncio.Future[Streams]

    @property
    def secret(self) -> bytes:
        """The identity and the key, which go to the worker by another way."""
        return self.identity + self.key


class WorkerPort:
    """Listens while it is open; a connection whose worker does not prove its key is closed without a word.

    ``refused`` counts those.
    """

    def __init__(self, host: str, port: int = 0) -> None:
        """Take the port; 0 stands for any free one.

        Raises:
            OSError: it is in use, or ``host`` is no address of this machine.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=1024)
        self.host, self.port = host, int(self._socket.getsockname()[1])
        self.refused = 0
        self._expected: dict[bytes, ExpectedWorker] = {}
        self._server: asyncio.Server | None = None
        self._opening = asyncio.Lock()

    async def open(self) -> None:
        """Accept connections; idempotent."""
        async with self._opening:
            if self._server is None:
                self._server = await asyncio.start_server(self._accept, sock=self._socket)

    def close(self) -> None:
        """Accept no more; those accepted live on."""
        if self._server is None:
            self._socket.close()
        else:
            self._server.close()

    def expect(self) -> ExpectedWorker:
        """Return a new identity, good for one connection, and its key."""
        streams = asyncio.get_running_loop().create_future()
        worker = ExpectedWorker(secrets.token_bytes(ID_BYTES), secrets.token_bytes(KEY_BYTES), streams)
        self._expected[worker.identity] = worker
        return worker

    def forget(self, worker: ExpectedWorker) -> None:
        """Refuse a worker that has not connected, and close the connection of one that has in vain."""
        self._expected.pop(worker.identity, None)
        if not worker.streams.cancel() and not worker.streams.cancelled():
            worker.streams.result()[1].close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                worker = await self._recognise(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            worker = None
        if worker is None or worker.streams.done():
            self.refused += 1
            writer.close()
        else:
            worker.streams.set_result((reader, writer))

    async def _recognise(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> ExpectedWorker | None:
        tune(writer.get_extra_info("socket"))
        ours = secrets.token_bytes(NONCE_BYTES)
        writer.write(ours)
        answer = await reader.readexactly(ID_BYTES + NONCE_BYTES + PROOF_BYTES)
        identity, theirs = answer[:ID_BYTES], answer[ID_BYTES : ID_BYTES + NONCE_BYTES]
        worker = self._expected.get(identity)
        given = answer[ID_BYTES + NONCE_BYTES :]
        if worker is None or not proves(given, worker.key, worker=True, theirs=ours, ours=theirs):
            return None
        del self._expected[identity]
        writer.write(proof(worker.key, worker=False, theirs=theirs, ours=ours))
        return worker
