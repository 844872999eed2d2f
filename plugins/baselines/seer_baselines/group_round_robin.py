"""Group round-robin, as veRL places rollouts: whole groups, pinned, left to the engine's queue."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from seer_core.model import GroupContext, InstanceStatus, Request
from seer_core.plugins.hookspecs import Startup, hookimpl
from seer_core.ports.policy import Placer

__all__ = ["GroupRoundRobin"]

TIER = "supported"


class GroupRoundRobin(Placer):
    """Gives group k to instance k mod n and sends everything at once, without asking what fits.

    The engine queues what it cannot run and preempts when its KV is full.  A group whose instance is
    lost moves, whole, to the next living one.
    """

    def __init__(self) -> None:
        self._home: WeakKeyDictionary[GroupContext, str] = WeakKeyDictionary()
        self._living: dict[str, InstanceStatus] = {}
        self._next = 0

    def instance_changed(self, instance: InstanceStatus) -> None:
        """Remember the instance; its load does not matter."""
        self._living[instance.id] = instance

    def instance_lost(self, instance: InstanceStatus) -> None:
        """Unpin the groups of a lost instance."""
        self._living.pop(instance.id, None)

    def place(
        self, request: Request, chunk_tokens: int, instances: Sequence[InstanceStatus]
    ) -> InstanceStatus:
        """Return the instance the group is pinned to."""
        home = self._living.get(self._home.get(request.group, ""))
        if home is None:
            home = instances[self._next % len(instances)]
            self._next += 1
            self._home[request.group] = home.id
        return home


@hookimpl
def seer_make_placer(settings: object, startup: Startup) -> GroupRoundRobin:
    """Pin whole groups to instances, in turn."""
    return GroupRoundRobin()
