"""An episode on a server of OpenEnv's: a session, which is a WebSocket with an environment of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import msgspec
import structlog
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, WebSocketException

from seer_core.errors import EngineError, printable, quote

__all__ = ["Episode", "InvalidAction"]

log = structlog.get_logger("seer")

PATIENCE_S = 30.0
"""Seconds for which an episode tries to reach a server that is away, as while it starts again."""
PAUSE_S = 0.5
"""Between two tries."""
CLOSE_S = 5.0
"""How long a server may take to end a session."""
LARGEST = 100 * 2**20
"""Bytes of a message, as OpenEnv's own client takes them: observations may hold pictures."""
SHOWN = 300
"""Characters of a server's reason that are shown."""


class InvalidAction(Exception):
    """The server takes this action for invalid; ``str(error)`` is the reason for the model."""


class Episode:
    """An episode: its reset, and the actions since, which are repeated on a server that was started anew."""

    def __init__(self, url: str, reset: Mapping[str, Any]) -> None:
        self._url = url
        self._reset = reset
        self._socket: ClientConnection | None = None
        self._actions: list[Mapping[str, Any]] = []

    async def begin(self) -> Mapping[str, Any]:
        """Reset the environment, repeat the actions so far, and return what the reset answered.

        Waits for a server that is away, and raises EngineError if it stays away, or refuses.
        """
        time = asyncio.get_running_loop().time
        until = time() + PATIENCE_S
        while True:
            try:
                self._socket = await connect(self._url, max_size=LARGEST, ping_interval=None)
                first = await self._ask("reset", self._reset)
                for action in self._actions:
                    await self._ask("step", action)
                return first
            except InvalidAction as error:
                raise EngineError(f"OpenEnv's environment refused its reset: {error}") from error
            except (OSError, WebSocketException) as error:
                if time() > until:
                    raise EngineError(
                        f"OpenEnv's server at {quote(self._url)} is gone, {_reason(error)}; start it again,"
                        " and look into its log"
                    ) from error
                log.info("openenv_away", url=self._url, reason=_reason(error))
                await asyncio.sleep(PAUSE_S)

    async def step(self, action: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the answer to an action: its ``observation``, ``reward`` and ``done``.

        Raises InvalidAction for an invalid action, and EngineError where the environment fails.
        """
        try:
            answer = await self._ask("step", action)
        except (OSError, ConnectionClosed) as error:
            log.warning("openenv_lost", url=self._url, reason=_reason(error))
            await self.begin()
            try:
                answer = await self._ask("step", action)
            except (OSError, ConnectionClosed) as again:
                raise EngineError(
                    f"OpenEnv's server at {quote(self._url)} was lost twice over the same action,"
                    f" {_reason(again)}; look into its log"
                ) from again
        self._actions.append(action)
        return answer

    async def close(self) -> None:
        """End the session; one that does not end in time is cut off."""
        socket, self._socket = self._socket, None
        if socket is None:
            return
        try:
            with suppress(TimeoutError, ConnectionClosed):
                async with asyncio.timeout(CLOSE_S):
                    await socket.send('{"type": "close"}')
                    await socket.wait_closed()
        finally:
            socket.transport.abort()

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the ``data`` of the answer to a message."""
        socket = self._socket
        assert socket is not None
        with suppress(ConnectionClosed):  # a server that is full says so before it closes: that is read below
            await socket.send(msgspec.json.encode({"type": kind, "data": data}).decode())
        answer = msgspec.json.decode(await socket.recv())
        found = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(found, dict):
            raise EngineError(f"OpenEnv's server at {quote(self._url)} answered {quote(answer)}")
        if answer.get("type") != "error":
            return found
        code, reason = found.get("code"), printable(str(found.get("message")), SHOWN)
        if code == "VALIDATION_ERROR":
            raise InvalidAction(_invalid(found.get("errors")) or reason)
        if code == "CAPACITY_REACHED":
            raise EngineError(
                f"OpenEnv's server at {quote(self._url)} has no room for another session: {reason}; start it"
                " with a higher max_concurrent_envs: a response holds one from its first turn to its end"
            )
        raise EngineError(f"OpenEnv's environment failed: {reason} ({printable(str(code), SHOWN)})")


def _invalid(errors: Any) -> str:
    """Return the reasons of pydantic's, each with the place in the action."""
    if not isinstance(errors, list):
        return ""
    found = [each for each in errors if isinstance(each, dict) and "msg" in each]
    return "; ".join(f"{'.'.join(map(str, each.get('loc') or ()))}: {each['msg']}" for each in found)


def _reason(error: BaseException) -> str:
    return printable(f"{type(error).__name__}: {error}", SHOWN)
