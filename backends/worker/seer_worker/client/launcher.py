"""Where a worker runs: a port of its own, so that nothing above it assumes one machine.

``seer_worker.client.local`` starts workers as child processes.  Another launcher may start them in a
container, or as actors of a cluster: it runs ``seer_worker.process.worker.work`` there, over a socket, and
brings back a ``Channel``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from seer_worker.wire import FromWorker, ToWorker

__all__ = ["Launcher", "RunningWorker"]


class RunningWorker(Protocol):
    """A worker that has been launched, as the runtime's event loop sees it."""

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

    def send(self, message: ToWorker) -> None:
        """Send a message; never blocks.

        Raises:
            WireError: it cannot be put on the wire.
        """
        ...

    async def receive(self) -> list[FromWorker]:
        """Wait for the next messages.

        Raises:
            EOFError: the worker is gone; a text says how the connection broke, if it was not closed.
            WireError: it sent something that is no message.
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


class Launcher(Protocol):
    """Starts workers, on this machine or elsewhere."""

    async def launch(self, name: str, interpreter: str, environment: Mapping[str, str]) -> RunningWorker:
        """Start a worker under an interpreter, with exactly this environment.

        ``name`` is the instance's id, for logs.

        Raises:
            EngineError: it cannot be started; a clause with the remedy.
        """
        ...
