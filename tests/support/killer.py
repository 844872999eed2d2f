"""Deaths at a named event, in its handler: no machine is too fast or too slow for them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

from seer_core.model.events import Command, Dispatch, Event

__all__ = ["Killer", "kill_worker_of"]


class Killer:
    """Observer that kills an instance, once, in the moment in which a chunk is sent there.

    That chunk cannot come to its end, so the rollout notices the loss for sure.  ``kill`` gets the id of the
    instance; while it is None, the killer is not armed and does not count.  It kills at the first chunk for
    ``instance``, or for any, once so many events or commands of a type have happened: ``after`` ones ``of``.
    """

    def __init__(
        self,
        kill: Callable[[str], Any] | None,
        *,
        after: int,
        of: type[Event | Command],
        instance: str | None = None,
    ) -> None:
        self.kill = kill
        self.killed: str | None = None
        self._left, self._of, self._instance = after, of, instance

    def observe(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        """Count, and kill once it is time."""
        if self.kill is None or self.killed is not None:
            return
        self._left -= sum(isinstance(each, self._of) for each in (event, *commands))
        sent = [each.instance_id for each in commands if isinstance(each, Dispatch)]
        if self._left <= 0 and (struck := next(filter(self._is_wanted, sent), None)) is not None:
            self.killed = struck
            self.kill(struck)

    def _is_wanted(self, instance: str) -> bool:
        return self._instance in (None, instance)


def kill_worker_of(runtime: Any) -> Callable[[str], None]:
    """Return a function that kills the process of an instance of a runtime."""
    return lambda instance: os.kill(runtime.engines[instance].worker.pid, signal.SIGKILL)
