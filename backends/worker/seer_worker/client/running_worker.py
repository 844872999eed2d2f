"""A worker that a launcher has started, here or elsewhere, and the stream of messages to it."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, runtime_checkable

from seer_host.frames import Frames, encode
from seer_host.json_files import describe_flaw

from seer_core.ports.weights import WeightSpec
from seer_worker.wire import Fatal, FromWorker, ToWorker

__all__ = ["Channel", "RunningWorker", "TemporaryWorker"]


class RunningWorker(Protocol):
    """A launched worker, as the runtime's event loop sees it.  Messages are the engine's."""

    @property
    def scratch(self) -> str:
        """A directory of the worker's own, where it runs; gone with it."""
        ...

    @property
    def log(self) -> str:
        """Where its output is: a path, or a sentence."""
        ...

    @property
    def received_bytes(self) -> int:
        """How much it has sent so far; a long message counts while it arrives."""
        ...

    def send(self, message: Any) -> None:
        """Send a message; never blocks.

        Raises:
            WireError: it cannot be put on the wire.
        """
        ...

    async def receive(self) -> list[Any]:
        """Wait for the next messages.

        Raises:
            EOFError: the worker is gone; a text says how the connection broke, if it was not closed.
            WireError: it sent something that is no message.
        """
        ...

    def bring_weights(self, source: WeightSpec) -> AbstractAsyncContextManager[WeightSpec]:
        """Make weights of this machine readable where it runs, and return what names them there.

        They are read within the context only; entering it raises an ``EngineError`` if they cannot get
        there.
        """
        ...

    async def end(self, grace_s: float = 0.0) -> str:
        """End the worker and all that it started, bounded; return how it ended.

        It is asked to end and given ``grace_s`` for it, before it is made to.  Safe on a worker already dead.
        """
        ...

    def last_words(self) -> str:
        """Return the last lines of what it wrote, and where all of it is."""
        ...

    def discard_log(self) -> None:
        """Drop what an ended worker has written, unless the user asked for it: nothing went wrong."""
        ...


@runtime_checkable
class TemporaryWorker(Protocol):
    """The further method of a ``RunningWorker`` whose place may be taken back with notice."""

    async def leaving(self) -> str:
        """Wait until its place is about to go, as of a node that is drained; return why."""
        ...


class Channel:
    """Messages over a stream: the part of a ``RunningWorker`` that is the same wherever it runs."""

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
