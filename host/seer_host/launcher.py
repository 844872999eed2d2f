"""Where the workers of engines run: a port of its own, so that nothing above it assumes one machine.

Engines that run in worker processes have a launcher of child processes of their own.  Another one starts them
in a container, or on the nodes of a cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from seer_core.ports.weights import WeightSpec

__all__ = ["Launcher", "RunningWorker", "TemporaryWorker"]


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


class Launcher(Protocol):
    """Starts workers, on this machine or elsewhere."""

    async def address(self) -> str:
        """Return this machine's address, at which workers and what they share reach it.

        Raises:
            EngineError: it cannot be known, for there is no cluster.
        """
        ...

    async def find_place(self, name: str, waiting: Callable[[str], None]) -> None:
        """Wait, without a limit, for a place where the worker of instance ``name`` can be launched again.

        ``waiting`` is called now and then meanwhile, with what is missing, in words.
        """
        ...

    async def launch(
        self, name: str, interpreter: str, environment: Mapping[str, str], log: Path, keep_log: bool
    ) -> RunningWorker:
        """Start a worker under an interpreter.

        Args:
            name: the instance's id.
            interpreter: a path, where the worker runs; this process's own stands for that of the other end.
            environment: what the engine sets, beside the variables of the place where the worker runs; the
                environment of a child process is whole.
            log: a file on this machine, to which all that the worker writes is appended.
            keep_log: whether ``RunningWorker.discard_log`` leaves it.

        Raises:
            NoPlaceError: there is no place for it yet, and the run may begin without it.
            EngineError: it cannot be started; a clause with the remedy.
        """
        ...
