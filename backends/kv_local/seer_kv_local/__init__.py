"""The KV pool of one node: blocks in shared memory, which every instance of a run there may read."""

import tempfile
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct
from seer_host.launcher import Launcher

from seer_core.plugins.hookspecs import Check, Startup, hookimpl
from seer_kv_local.machine import PART, disk_checks, memory_checks
from seer_kv_local.nodes import NodePools
from seer_kv_local.pool import LocalPool

__all__ = ["LocalPool", "NodePools", "Settings"]

TIER = "supported"


class Settings(Struct, frozen=True):
    """``[kv_pool.local]``: a KV pool in the memory of one machine, on a cluster one on each node."""

    capacity_bytes: Annotated[int, Meta(ge=1 << 20)] = 1 << 30
    """The memory of the pool over all instances, which is taken as the pool fills."""
    disk_bytes: Annotated[int, Meta(ge=0)] = 0
    """The disk for blocks that memory evicts, over all instances, reserved at the start; 0 for none."""
    disk_path: str | None = None
    """The directory of the disk tier, relative to the config file. Without it: where temporary files go."""

    def directory(self, startup: Startup | None) -> Path:
        """Return where the disk tier lies."""
        path = self.disk_path or tempfile.gettempdir()
        return Path(path) if startup is None else startup.path(path)


@hookimpl
def seer_make_kv_pool(
    settings: Settings, startup: Startup, launcher: Launcher | None
) -> LocalPool | NodePools:
    """Return the pool, which takes its memory when started; on a cluster there is one on each node."""
    if launcher is not None:
        path = str(settings.directory(startup)) if settings.disk_path else ""
        return NodePools(settings.capacity_bytes, settings.disk_bytes, path)
    return LocalPool(settings.capacity_bytes, settings.disk_bytes, settings.directory(startup))


@hookimpl
def seer_doctor(settings: Settings | None, startup: Startup | None) -> list[Check]:
    """Compare the pool with the machine's memory and the room on its disk."""
    settings = settings or Settings()
    if startup is not None and not startup.workers_here:
        there = "memory and disk of the nodes are not checked here: each instance checks its node's"
        return [Check(PART, True, there, "")]
    found = memory_checks(settings.capacity_bytes)
    if settings.disk_bytes:
        found += disk_checks(settings.disk_bytes, settings.directory(startup))
    return found
