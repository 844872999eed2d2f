"""Placers that put chunks where no good policy would, to measure and to test what moving costs and keeps."""

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


class NeverMigrate(Placer):
    """Keeps every request on its first instance, which is the emptiest one."""

    def place(
        self, request: Request, chunk_tokens: int, instances: Sequence[InstanceStatus]
    ) -> InstanceStatus | None:
        """Return the request's instance, once it has one."""
        home = [each for each in instances if each.id == request.instance]
        return _emptiest(home or instances, request, chunk_tokens)


class AtMost(Placer):
    """Keeps ``batch`` requests in flight on the only instance."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def place(
        self, request: Request, chunk_tokens: int, instances: Sequence[InstanceStatus]
    ) -> InstanceStatus | None:
        """Return the instance while it has fewer."""
        return instances[0] if instances[0].running < self.batch else None
