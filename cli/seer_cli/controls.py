"""Commands from a page on a rollout that goes on: pause, go on, drain an instance, give up a group."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import TimeoutError as LateError
from contextlib import contextmanager
from typing import TYPE_CHECKING

import structlog

from seer_core.errors import InputError, SeerError, quote
from seer_core.ports.policy import Observer
from seer_core.runtime.rollout import Rollout
from seer_core.runtime.runtime import Runtime

if TYPE_CHECKING:
    from seer_cli.report.dashboard import PageCommand

__all__ = ["RunControls", "watched"]

log = structlog.get_logger("seer")

LONGEST_S = 60.0
"""How long a viewer waits for a command to be carried out."""


class RunControls:
    """Carries commands out in the event loop of the rollout, which ``attach`` gives it."""

    def __init__(self) -> None:
        self._at: tuple[asyncio.AbstractEventLoop, Runtime, Rollout] | None = None

    def attach(self, runtime: Runtime, rollout: Rollout) -> None:
        """Take commands for this rollout, whose event loop is the running one."""
        self._at = asyncio.get_running_loop(), runtime, rollout

    def __call__(self, command: PageCommand) -> str:
        """Carry a command out, called in another thread, and return a sentence about it.

        Raises:
            SeerError: the rollout has not begun, or cannot do that.
        """
        if self._at is None:
            raise SeerError("the rollout has not begun; wait until its instances have started")
        loop, runtime, rollout = self._at
        if rollout.over:
            raise SeerError("the rollout is over; nothing is left to command")
        log.info("dashboard_command", do=command.do, what=command.what)
        working = asyncio.run_coroutine_threadsafe(_carry_out(command, runtime, rollout), loop)
        try:
            return working.result(LONGEST_S)
        except LateError:
            return "this takes longer than a minute; it goes on"


async def _carry_out(command: PageCommand, runtime: Runtime, rollout: Rollout) -> str:
    match command.do:
        case "pause":
            await rollout.pause()
            return "paused: no chunk is sent until the rollout goes on"
        case "resume":
            rollout.resume()
            return "the rollout goes on"
        case "drain":
            if command.what not in runtime.alive:
                raise InputError(f"no instance {quote(command.what)} is up; choose one of the list")
            if len(runtime.alive) == 1:
                raise InputError(f"{quote(command.what)} is the last instance; the rollout could not go on")
            await runtime.remove(command.what)
            return f"{command.what} is drained and ended; others take over its requests"
        case "give_up":
            before = len(rollout.unfinished)
            rollout.abort_group(command.what)
            count = before - len(rollout.unfinished)
            if not count:
                raise InputError(f"no request of a group {quote(command.what)} is unfinished; choose another")
            return f"{count} requests of {command.what} were given up with the tokens that they have"
    raise InputError(f"{quote(command.do)} is no command; it may be pause, resume, drain or give_up")


@contextmanager
def watched(port: int | None, name: str) -> Iterator[tuple[Sequence[Observer], RunControls]]:
    """Serve the page of a run on this port, 0 for a free one; nothing on None.

    Yields the observers that the run needs for it, and what carries its commands out.

    Raises:
        OutputError: the port is taken.
    """
    controls = RunControls()
    if port is None:
        yield (), controls
        return
    from seer_cli.report.dashboard import Dashboard  # it brings numpy and a server

    with Dashboard(f"Seer: {name}", port, controls) as dashboard:
        yield (dashboard.watch(name),), controls
