"""Sticky until full, then the least KV in use: the balancer that verl's users ask for.

After verl's roadmap for its load balancer (verl-project/verl, issues 5442 and 6383): a request goes where its
prefix is, unless that server is overloaded, and else to the one with the lowest KV usage.  Servers queue.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from seer_core.model import InstanceStatus, Request
from seer_core.plugins.config_types import Share
from seer_core.plugins.hookspecs import Startup, hookimpl
from seer_core.ports.policy import Placer

__all__ = ["KvAwareSticky", "Settings"]

TIER = "experimental"


class Settings(Struct, frozen=True, forbid_unknown_fields=True):
    """``[plugin.kv_aware_sticky]``: when an instance counts as full."""

    full_share: Share = 0.9
    """An instance is full if it reports so much of its KV in use, or has no free slot."""


class KvAwareSticky(Placer):
    """Sends a request at once to the instance that has its KV or its group's prompt, unless it is full.

    Otherwise the one with the least KV in use gets it, by its last report; among equals the one with the
    fewest requests.  As in verl, requests queue in the engine, which preempts when its KV is full.
    """

    def __init__(self, full_share: float) -> None:
        self._full_share = full_share

    def place(
        self, request: Request, chunk_tokens: int, instances: Sequence[InstanceStatus]
    ) -> InstanceStatus:
        """Return the instance with the prefix, or else the least used."""
        siblings = request.group.in_flight
        home = next((each for each in instances if each.id == request.instance), None)
        if home is None:
            with_prompt = [each for each in instances if each.id in siblings]
            home = max(with_prompt, key=lambda each: (siblings[each.id], -each.seq), default=None)
        if home is not None and not self._is_full(home):
            return home
        return min(instances, key=lambda each: (each.reported_kv_usage, each.running, each.seq))

    def _is_full(self, instance: InstanceStatus) -> bool:
        return instance.free_slots <= 0 or instance.reported_kv_usage >= self._full_share


@hookimpl
def seer_make_placer(settings: Settings, startup: Startup) -> KvAwareSticky:
    """Place where the prefix is, until that instance is full."""
    return KvAwareSticky(settings.full_share)
