"""Checks of the machine for the pool: Mooncake's package, the libraries it is linked to, memory, disk."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
from pathlib import Path

from seer_host.installation import how_to_install, in_checkout
from seer_host.machine_memory import available_bytes

from seer_core.plugins.hookspecs import Check
from seer_mooncake.settings import Settings

__all__ = ["checks", "disk_check", "installation", "master_binary", "memory_check"]

PART = "kv_pool"
LIBRARIES = {"libibverbs.so.1": "libibverbs1", "libnuma.so.1": "libnuma1", "libcurl.so.4": "libcurl4"}
"""What the wheels are linked to and do not bring (``readelf -d``, 0.3.13), with Debian's packages."""
CUDA_LIBRARIES = {"libmlx5.so.1": "ibverbs-providers"}
"""What the wheels for CUDA need besides."""


def master_binary() -> Path | None:
    """Return the master that comes with Mooncake's wheels, without importing them."""
    spec = importlib.util.find_spec("mooncake")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0]) / "mooncake_master"


def installation() -> Check:
    """Look for Mooncake and the libraries it is linked to, without importing it."""
    binary = master_binary()
    if binary is None or not binary.is_file():
        how = how_to_install("mooncake", "`make setup` (with a GPU: `make setup DEVICE=gpu`)")
        return Check(PART, False, "Mooncake is not installed", how)
    wanted = LIBRARIES | (CUDA_LIBRARIES if _is_linked_to(binary.parent, b"libmlx5.so.1") else {})
    lacking = {library: package for library, package in wanted.items() if not _loads(library)}
    if lacking:
        by_hand = f"apt-get install {' '.join(lacking.values())}"
        how = (
            f"run scripts/install-system-packages, or: {by_hand}"
            if in_checkout()
            else f"install them, on Debian or Ubuntu by: {by_hand}"
        )
        finding = f"Mooncake lacks shared libraries of this system: {', '.join(lacking)}"
        return Check(PART, False, finding, how)
    return Check(PART, True, "Mooncake and the libraries it is linked to", "")


def checks(settings: Settings, directory: Path | None) -> list[Check]:
    """Return the checks of a pool with these settings."""
    found = [installation(), memory_check(settings.capacity_bytes)]
    if directory is not None:
        found.append(disk_check(settings.disk_bytes, directory))
    return found


def memory_check(wanted: int) -> Check:
    """Compare memory that is to be lent with what this machine has."""
    available = available_bytes()
    return Check(
        PART,
        wanted <= available,
        f"a pool of {wanted / 2**30:.2f} GiB, {available / 2**30:.1f} GiB of memory available",
        "" if wanted <= available else "lower [kv_pool.mooncake].capacity_bytes",
    )


def disk_check(wanted: int, directory: Path) -> Check:
    """Compare room on disk that is to be taken with what a directory has."""
    there = directory.is_dir() and os.access(directory, os.W_OK)
    free = shutil.disk_usage(directory).free if there else 0
    return Check(
        PART,
        wanted <= free,
        f"{wanted / 2**30:.2f} GiB of disk, {free / 2**30:.1f} GiB free in {directory}"
        if there
        else f"{directory} is no directory, or cannot be written",
        "" if wanted <= free else "correct [kv_pool.mooncake].disk_path, or lower disk_bytes",
    )


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _is_linked_to(package: Path, name: bytes) -> bool:
    return any(name in path.read_bytes() for path in package.glob("engine*.so"))
