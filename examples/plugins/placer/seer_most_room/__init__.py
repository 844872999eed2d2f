"""A chunk goes where most KV is free."""

from collections.abc import Sequence

from seer_core.hookspecs import hookimpl
from seer_core.model import InstanceStatus, Request
from seer_core.policy import Placer


class MostRoom:
    """Placer by free KV, among the instances whose batch has a slot and whose KV holds the whole chunk."""

    def instance_changed(self, instance: InstanceStatus) -> None:
        """Learn that an instance has started or that its load has changed; it is looked at when placing."""

    def instance_lost(self, instance: InstanceStatus) -> None:
        """Forget an instance; nothing is kept of it."""

    def place(
        self, request: Request, chunk_tokens: int, instances: Sequence[InstanceStatus]
    ) -> InstanceStatus | None:
        """Return the instance for this chunk, or None to keep it waiting."""
        fit = [
            instance
            for instance in instances
            if instance.free_slots > 0
            and instance.footprint(request, chunk_tokens) <= instance.free_kv_tokens
        ]
        return max(fit, key=lambda instance: (instance.free_kv_tokens, -instance.seq), default=None)


@hookimpl
def seer_make_placer() -> Placer:
    """Fill the slot."""
    return MostRoom()
