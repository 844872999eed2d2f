"""Checks of the machine for the pool: Linux, memory, and room on a disk."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from seer_host.machine_memory import available_bytes

from seer_core.plugins.hookspecs import Check

__all__ = ["PART", "disk_checks", "memory_checks"]

PART = "kv_pool"


def memory_checks(capacity_bytes: int) -> list[Check]:
    """Return the checks of the pool in memory."""
    if not hasattr(os, "memfd_create"):
        return [Check(PART, False, "this system has no memfd_create", 'use Linux, or set kv_pool = "none"')]
    available = available_bytes()
    return [
        Check(
            PART,
            capacity_bytes <= available,
            f"a pool of {capacity_bytes / 2**30:.2f} GiB, {available / 2**30:.1f} GiB of memory available",
            "" if capacity_bytes <= available else "lower [kv_pool.local].capacity_bytes",
        )
    ]


def disk_checks(disk_bytes: int, directory: Path) -> list[Check]:
    """Return the checks of the pool's disk tier."""
    try:
        free = shutil.disk_usage(directory).free
    except OSError as error:
        finding = f"no disk tier in {str(directory)!r}: {error.strerror}"
        return [Check(PART, False, finding, "name another [kv_pool.local].disk_path")]
    return [
        Check(
            PART,
            disk_bytes <= free,
            f"a disk tier of {disk_bytes / 2**30:.2f} GiB, {free / 2**30:.1f} GiB free in {str(directory)!r}",
            "" if disk_bytes <= free else "lower [kv_pool.local].disk_bytes, or name another disk_path",
        )
    ]
