"""Sticky sessions, as verl and SkyRL place agents: each trajectory stays where it began, turn by turn."""

from __future__ import annotations

from collections.abc import Sequence

from seer_core.model import InstanceStatus, Request
from seer_core.plugins.hookspecs import Startup, hookimpl
from seer_core.ports.policy import Placer

__all__ = ["StickySessions"]

TIER = "experimental"


class StickySessions(Placer):
    """Begins each response on the instance with the fewest requests, and keeps it there.

    All are sent at once, without asking what fits; a turn is one request, at the end of its engine's queue.
    Between turns the engine's prefix cache keeps KV until others need the room, longest unused first.  A
    response whose instance is lost begins anew on another.
    """

    def place(
        self, request: Request, chunk_tokens: int, instances: Sequence[InstanceStatus]
    ) -> InstanceStatus:
        """Return the response's instance."""
        home = next((each for each in instances if each.id == request.instance), None)
        return home or min(instances, key=lambda each: (each.running, each.seq))


@hookimpl
def seer_make_placer(settings: object, startup: Startup) -> StickySessions:
    """Keep each response on one instance."""
    return StickySessions()
