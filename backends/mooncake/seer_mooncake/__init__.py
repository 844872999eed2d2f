"""Mooncake Store as the KV pool: memory of all instances, and a disk below it, behind one master."""

import ipaddress
import tempfile
from pathlib import Path

from seer_host.launcher import Launcher

from seer_core.errors import ConfigError
from seer_core.plugins.hookspecs import Check, Startup, hookimpl
from seer_mooncake.pool import MooncakePool
from seer_mooncake.settings import Settings
from seer_mooncake.system import checks, installation

__all__ = ["MooncakePool", "Settings"]


@hookimpl
def seer_make_kv_pool(settings: Settings, startup: Startup, launcher: Launcher | None) -> MooncakePool:
    """Return the pool, which starts or joins its master when started."""
    if launcher is not None and (flaw := _cluster_flaw(settings)):
        raise ConfigError(flaw)
    return MooncakePool(settings, _directory(settings, startup), launcher)


@hookimpl
def seer_doctor(settings: Settings | None, startup: Startup | None) -> list[Check]:
    """Look for Mooncake and the libraries it is linked to, and, if it is to be used, for memory and disk."""
    if settings is None:
        return [installation()]
    if startup is None or startup.workers_here:
        return checks(settings, _directory(settings, startup))
    flaw = _cluster_flaw(settings)
    there = "Mooncake, memory and disk of the nodes are not checked here: each instance checks its node's"
    return [
        *([] if settings.master else [installation()]),
        Check("kv_pool", not flaw, *flaw.split("; ", 1)) if flaw else Check("kv_pool", True, there, ""),
    ]


def _cluster_flaw(settings: Settings) -> str:
    """Return what is wrong where instances are on several nodes, with the remedy; empty if nothing is."""
    if settings.host:
        return (
            f"[kv_pool.mooncake].host = {settings.host!r} names one machine, and instances are on the nodes"
            " of a cluster; leave it out: each uses its node's own address"
        )
    if settings.master and _is_loopback(settings.master.rpartition(":")[0]):
        return (
            f"[kv_pool.mooncake].master = {settings.master!r} is on loopback, which other nodes do not reach;"
            " name the address at which they do, or leave it out"
        )
    return ""


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _directory(settings: Settings, startup: Startup | None) -> Path | None:
    """Return where the disk tier lies, if there is one."""
    if not settings.disk_bytes:
        return None
    path = settings.disk_path or tempfile.gettempdir()
    return startup.path(path) if startup else Path(path)
