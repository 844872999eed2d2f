"""The KV pool of one machine: blocks in shared memory, which every instance of a run may read."""

import tempfile
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from seer_core.plugins.hookspecs import Check, Startup, hookimpl
from seer_kv_local.machine import disk_checks, memory_checks
from seer_kv_local.pool import LocalPool

__all__ = ["LocalPool", "Settings"]

TIER = "supported"


class Settings(Struct, frozen=True):
    """``[kv_pool.local]``: both sizes are over all instances.

    ``capacity_bytes`` of memory are taken as it is filled.  What it evicts goes to disk:
    ``disk_bytes``, 0 for none, are reserved at the start in the directory ``disk_path``, relative to the
    config file, or else where temporary files go.
    """

    capacity_bytes: Annotated[int, Meta(ge=1 << 20)] = 1 << 30
    disk_bytes: Annotated[int, Meta(ge=0)] = 0
    disk_path: str | None = None

    def directory(self, startup: Startup | None) -> Path:
        """Return where the disk tier lies."""
        path = self.disk_path or tempfile.gettempdir()
        return Path(path) if startup is None else startup.path(path)


@hookimpl
def seer_make_kv_pool(settings: Settings, startup: Startup) -> LocalPool:
    """Return the pool, which takes its memory when started."""
    return LocalPool(settings.capacity_bytes, settings.disk_bytes, settings.directory(startup))


@hookimpl
def seer_doctor(settings: Settings | None, startup: Startup | None) -> list[Check]:
    """Compare the pool with the machine's memory and the room on its disk."""
    settings = settings or Settings()
    found = memory_checks(settings.capacity_bytes)
    if settings.disk_bytes:
        found += disk_checks(settings.disk_bytes, settings.directory(startup))
    return found
