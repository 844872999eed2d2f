"""Commands on a rollout that goes on: pause, go on, drain or limit an instance, give up a group."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from concurrent.futures import TimeoutError as LateError
from functools import partial
from typing import Annotated, Any, Literal, get_args

import msgspec
import structlog
from msgspec import Meta
from seer_session.rollouts import Rollout
from seer_session.runtime import Runtime

from seer_core.errors import InputError, SeerError, quote

__all__ = ["COMMANDS", "RunCommand", "RunControls", "carry_out"]

log = structlog.get_logger("seer")

LONGEST_S = 60.0
"""How long a viewer waits for a command to be carried out."""


CommandKind = Literal["pause", "resume", "drain", "limit", "give_up"]
COMMANDS = get_args(CommandKind)
"""The kinds of commands, by name."""


class RunCommand(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A command on a rollout that goes on."""

    do: CommandKind
    """Its kind."""
    what: str = ""
    """The instance that is drained or limited, or the group that is given up."""
    max_running: Annotated[int, Meta(ge=1)] | None = None
    """The most chunks that a limited instance gets at once."""
    by: Annotated[str, Meta(max_length=200)] = ""
    """The person or program that asks for it; it is noted in the trace."""


Submit = Callable[[Coroutine[Any, Any, str]], Future[str]]
"""Runs a coroutine in the event loop of a runtime."""


class RunControls:
    """Carries commands out in the event loop of the rollout, which ``attach`` gives it."""

    def __init__(self) -> None:
        self._at: tuple[Submit, Runtime] | None = None

    def attach(self, runtime: Runtime, submit: Submit | None = None) -> None:
        """Take commands for the rollouts of this runtime.

        ``submit`` runs a coroutine in its event loop, which is the running one without it.
        """
        if submit is None:
            submit = partial(asyncio.run_coroutine_threadsafe, loop=asyncio.get_running_loop())
        self._at = submit, runtime

    def __call__(self, command: RunCommand) -> str:
        """Carry a command out, called in another thread, and return a sentence about it.

        Raises:
            SeerError: no rollout goes on, or it cannot do that.
        """
        if self._at is None:
            raise SeerError("the rollout has not begun; wait until its instances have started")
        submit, runtime = self._at
        by = f"{command.by} (dashboard)" if command.by else "dashboard"
        working = submit(carry_out(msgspec.structs.replace(command, by=by), runtime))
        try:
            return working.result(LONGEST_S)
        except LateError:
            return "this takes longer than a minute; it goes on"


async def carry_out(command: RunCommand, runtime: Runtime) -> str:
    """Carry a command out on the rollout under way, and return a sentence about it.

    Raises:
        SeerError: no rollout goes on, or it cannot do that.
    """
    rollout = runtime.current
    if rollout is None or rollout.over:
        raise SeerError("no rollout goes on; nothing is there to command")
    log.info("run_command", do=command.do, what=command.what, by=command.by)
    match command.do:
        case "pause":
            await rollout.pause(by=command.by)
            return "paused: no chunk is sent until the rollout goes on"
        case "resume":
            rollout.resume(by=command.by)
            return "the rollout goes on"
        case "drain":
            if command.what not in runtime.alive:
                raise InputError(f"no instance {quote(command.what)} is up; choose another")
            if len(runtime.alive) == 1:
                raise InputError(f"{quote(command.what)} is the last instance; the rollout could not go on")
            await runtime.remove(command.what, command.by)
            return f"{command.what} is drained and ended; others take over its requests"
        case "limit":
            if command.max_running is None:
                raise InputError("a limit needs max_running, the most chunks at once")
            runtime.limit(command.what, command.max_running, command.by)
            return f"{command.what} gets no chunk while {command.max_running} run there"
        case "give_up":
            return _give_up(rollout, command)


def _give_up(rollout: Rollout, command: RunCommand) -> str:
    before = len(rollout.unfinished)
    rollout.abort_group(command.what, command.by)
    count = before - len(rollout.unfinished)
    if not count:
        raise InputError(f"no request of a group {quote(command.what)} is unfinished; choose another")
    return f"{count} requests of {command.what} were given up with the tokens that they have"
