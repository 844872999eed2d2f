"""Mooncake Store as the KV pool: memory of all instances, and a disk below it, behind one master."""

import tempfile
from pathlib import Path

from seer_core.plugins.hookspecs import Check, Startup, hookimpl
from seer_mooncake.pool import MooncakePool
from seer_mooncake.settings import Settings
from seer_mooncake.system import checks, installation

__all__ = ["MooncakePool", "Settings"]


@hookimpl
def seer_make_kv_pool(settings: Settings, startup: Startup) -> MooncakePool:
    """Return the pool, which starts or joins its master when started."""
    return MooncakePool(settings, _directory(settings, startup))


@hookimpl
def seer_doctor(settings: Settings | None, startup: Startup | None) -> list[Check]:
    """Look for Mooncake and the libraries it is linked to, and, if it is to be used, for memory and disk."""
    if settings is None:
        return [installation()]
    return checks(settings, _directory(settings, startup))


def _directory(settings: Settings, startup: Startup | None) -> Path | None:
    """Return where the disk tier lies, if there is one."""
    if not settings.disk_bytes:
        return None
    path = settings.disk_path or tempfile.gettempdir()
    return startup.path(path) if startup else Path(path)
