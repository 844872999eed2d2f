"""A scorer by other clients' load, for servers that Seer does not have to itself."""

from __future__ import annotations

from seer_core.model import InstanceStatus, Request

__all__ = ["other_clients"]


def other_clients(request: Request, instance: InstanceStatus, home: InstanceStatus | None) -> float:
    """Scorer: minus the KV that requests of other clients use there, and that those would which wait."""
    others = instance.reported_running + instance.reported_waiting - instance.running
    if others <= 0:
        return 0.0
    capacity, running = instance.info.kv_capacity_tokens, max(1, instance.reported_running)
    used = instance.reported_kv_usage * capacity
    return -min(float(capacity), used * others / running)
