"""Placers that move every request at every chunk, or none, to test what moving keeps."""

from __future__ import annotations

from collections.abc import Sequence

from seer_core.model import InstanceStatus, Request
from seer_core.ports.policy import Placer


def _emptiest(instances: Sequence[InstanceStatus], request: Request, tokens: int) -> InstanceStatus | None:
    fits = [
        each
        for each in instances
        if each.free_slots > 0 and each.footprint(request, tokens) <= each.free_kv_tokens
    ]
    return max(fits, key=lambda each: (each.free_kv_tokens, -each.seq), default=None)


class AlwaysMigrate(Placer):
    """Puts every chunk on the emptiest instance that is not the request's last one."""

    def place(
        self, request: Request, chunk_tokens: int, instances: Sequence[InstanceStatus]
    ) -> InstanceStatus | None:
        """Return another instance than the request's last."""
        others = [each for each in instances if each.id != request.instance or len(instances) == 1]
        return _emptiest(others, request, chunk_tokens)


class Stay(Placer):
    """Puts every chunk on its request's last instance, and the first on the emptiest."""

    def place(
        self, request: Request, chunk_tokens: int, instances: Sequence[InstanceStatus]
    ) -> InstanceStatus | None:
        """Return the request's last instance."""
        home = [each for each in instances if each.id == request.instance]
        return _emptiest(home or instances, request, chunk_tokens)
