"""Responses that move between turns, and only then.

After Heddle (arXiv 2603.28101): a trajectory moves to an instance with less load while its tool works, so
that the time of the move is hidden.  There the priority of trajectories follows a running prediction, and
placement a dynamic program; here this is the placer alone, for the order is another plug-in's.
"""

from __future__ import annotations

from collections.abc import Sequence

from seer_core.model import GroupContext, InstanceStatus, Request
from seer_core.plugins.hookspecs import Startup, hookimpl
from seer_core.ports.policy import Placement, Placer
from seer_rivals.session_queues import RESERVED_TOKENS

__all__ = ["MigrateInTools"]

TIER = "experimental"


class MigrateInTools(Placer):
    """Chooses for each turn the instance with the most free KV; its further chunks stay while they fit there.

    A pool brings the KV along.
    """

    def __init__(self) -> None:
        self._between_turns: set[int] = set()

    def turn_ended(self, request: Request) -> None:
        """Let the next turn go anywhere."""
        self._between_turns.add(request.seq)

    def group_changed(self, group: GroupContext, request: Request) -> None:
        """Forget a response that is over."""
        self._between_turns.discard(request.seq)

    def place(
        self, request: Request, chunk_tokens: int, instances: Sequence[InstanceStatus]
    ) -> Placement | None:
        """Return the instance, or None while the chunk does not fit there."""
        tokens = min(chunk_tokens, RESERVED_TOKENS)
        home = next((each for each in instances if each.id == request.instance), None)
        if home is not None and request.seq not in self._between_turns and _fits(home, request, tokens):
            return Placement(home, "home", tokens)
        fits = [each for each in instances if _fits(each, request, tokens)]
        if not fits:
            return None
        self._between_turns.discard(request.seq)
        emptiest = max(fits, key=lambda each: (each.free_kv_tokens, each is home, -each.seq))
        return Placement(emptiest, "home" if emptiest is home else "emptiest", tokens)


def _fits(instance: InstanceStatus, request: Request, chunk_tokens: int) -> bool:
    """Return whether an instance has a slot and KV for a chunk; an idle one has."""
    if not instance.running:
        return True
    return instance.free_slots > 0 and instance.footprint(request, chunk_tokens) <= instance.free_kv_tokens


@hookimpl
def seer_make_placer(startup: Startup) -> MigrateInTools:
    """Move responses between turns."""
    return MigrateInTools()
