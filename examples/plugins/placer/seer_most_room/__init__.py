"""A chunk goes where most KV is free."""

from collections.abc import Sequence

from seer_core.model import InstanceStatus, Request
from seer_core.plugins.hookspecs import hookimpl
from seer_core.ports.policy import Placer


class MostRoom(Placer):
    """Placer by free KV, among the instances whose batch has a slot and whose KV holds the whole chunk."""

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
