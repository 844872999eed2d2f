"""The contract of a worker that a launcher has started, here or elsewhere."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, runtime_checkable

from seer_core.ports.weights import WeightSpec

__all__ = ["RunningWorker", "TemporaryWorker"]


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
