"""The KV pool of one machine: blocks in shared memory, which every instance of a run may read."""

from typing import Annotated

from msgspec import Meta, Struct

from seer_core.hookspecs import Check, Startup, hookimpl
from seer_kv_local.machine import checks
from seer_kv_local.pool import LocalPool

__all__ = ["LocalPool", "Settings"]


class Settings(Struct, frozen=True):
    """``[kv_pool.local]``: ``capacity_bytes`` of memory over all instances, taken as it is filled."""

    capacity_bytes: Annotated[int, Meta(ge=1 << 20)] = 1 << 30


@hookimpl
def seer_make_kv_pool(settings: Settings, startup: Startup) -> LocalPool:
    """Return the pool, which takes its memory when started."""
    return LocalPool(settings.capacity_bytes)


@hookimpl
def seer_doctor(settings: Settings | None, startup: Startup | None) -> list[Check]:
    """Compare the pool with the machine's memory."""
    return checks((settings or Settings()).capacity_bytes)
