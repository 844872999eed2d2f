"""Where the workers of engines run: a port of its own, so that nothing above it assumes one machine.

Engines that run in worker processes have a launcher of child processes of their own.  Another one starts them
in a container, or on the nodes of a cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

__all__ = ["Launcher"]


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
    ) -> Any:
        """Start a worker under an interpreter, and return the ``RunningWorker`` of ``seer-worker`` for it.

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
