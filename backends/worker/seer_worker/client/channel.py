"""The runtime's end of the stream to a worker, wherever that runs."""

from __future__ import annotations

import asyncio

from seer_host.frames import Frames, encode
from seer_host.json_files import describe_flaw

from seer_worker.wire import Fatal, FromWorker, ToWorker

__all__ = ["Channel"]


class Channel:
    """Messages over a stream."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.received_bytes = 0
        self.fatal: str | None = None
        """The reason that the worker sent of its own end, if it did."""
        self._reader, self._writer = reader, writer
        self._loop = asyncio.get_running_loop()
        self._frames: Frames[FromWorker] = Frames(FromWorker)
        self._outbox: list[bytes] = []

    def send(self, message: ToWorker) -> None:
        """Send a message at the end of this turn of the event loop, all of one turn together."""
        if not self._outbox:
            self._loop.call_soon(self._flush)
        self._outbox.append(encode(message))

    async def receive(self) -> list[FromWorker]:
        """Wait for the next messages; ``Fatal`` is kept in ``fatal``, too.

        Raises:
            EOFError: the worker is gone; a text says how the connection broke, if it was not closed.
            WireError: it sent something that is no message.
        """
        while True:
            try:
                data = await self._reader.read(1 << 20)
            except ConnectionError as error:
                raise EOFError from error
            except OSError as error:  # as of a host that is gone; ETIMEDOUT is a TimeoutError
                raise EOFError(f"its connection broke: {describe_flaw(error)}") from error
            if not data:
                raise EOFError
            self.received_bytes += len(data)
            messages = list(self._frames.feed(data))
            for message in messages:
                if isinstance(message, Fatal):
                    self.fatal = message.reason
            if messages:
                return messages

    def close(self) -> None:
        """Close the stream."""
        self._writer.close()

    def _flush(self) -> None:
        self._writer.write(b"".join(self._outbox))
        self._outbox.clear()
