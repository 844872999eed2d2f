"""The door of agents: how requests name their trajectory and its group, and the routes that end them."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from seer_core.errors import quote
from seer_server.http import read_json
from seer_server.trajectories import LONGEST_ID, AgentTurn, Trajectories
from seer_server.unsupported_fields import FieldError

__all__ = ["TRAJECTORY_HEADERS", "EndTrajectories", "ReleaseRequest", "trajectory_in", "turn_of"]

TRAJECTORY_HEADERS = ("x-seer-trajectory", "x-dynamo-session-id", "x-session-id", "session-id")
"""Headers with the id of a trajectory: Seer's, Dynamo's, that of OpenCode and verifiers, and Codex's."""

LAST_HEADER = "x-dynamo-session-final"
"""Is ``true`` with the last request of a trajectory, as Dynamo's clients send it."""


class ReleaseRequest(Struct, frozen=True):
    """The body of ``POST /programs/release``, as ThunderAgent has it."""

    program_id: str
    """The id of the trajectory."""


def trajectory_in(headers: Mapping[str, str]) -> str | None:
    """Return the id of a trajectory that headers have; None if there is none."""
    return next((value for name in TRAJECTORY_HEADERS if (value := headers.get(name))), None)


def turn_of(trajectory: str | None, group: str | None, headers: Mapping[str, str]) -> AgentTurn | None:
    """Return the turn that a request is; None if it names no trajectory.

    Raises:
        FieldError: an id cannot be one.
    """
    if trajectory is None:
        return None
    for name, value in (("trajectory", trajectory), ("group", group)):
        if value is not None and not (0 < len(value) <= LONGEST_ID and value.isprintable()):
            raise FieldError(
                f"{name} is {quote(value)}; an id has 1 to {LONGEST_ID} characters that can be printed",
                name,
            )
    return AgentTurn(trajectory, group or "", headers.get(LAST_HEADER, "").strip().lower() == "true")


@attrs.define(eq=False)
class EndTrajectories:
    """Routes by which clients end trajectories, whose KV is dropped once no turn is under way.

    An id that is not known is no error: the trajectory may have been forgotten.
    """

    trajectories: Trajectories

    async def end(self, request: Request) -> Response:
        """End a trajectory, and answer whether there was one."""
        return JSONResponse({"ended": int(self.trajectories.end(request.path_params["id"]))})

    async def end_group(self, request: Request) -> Response:
        """End a group, and all of its trajectories."""
        return JSONResponse({"ended": self.trajectories.end_group(request.path_params["id"]) or 0})

    async def release(self, request: Request) -> Response:
        """End a trajectory, as clients of ThunderAgent do."""
        asked = await read_json(request, ReleaseRequest)
        released = self.trajectories.end(asked.program_id)
        return JSONResponse({"program_id": asked.program_id, "released": released})

    async def finish(self, request: Request) -> Response:
        """End a trajectory, as SkyRL's client does at its router."""
        return JSONResponse({"ended": int(self.trajectories.end(request.query_params.get("session_id", "")))})
