"""Checks of the machine for the settings of any engine: a model, CPUs, memory."""

from __future__ import annotations

import os
from pathlib import Path

from seer_core.plugins.hookspecs import Check

__all__ = ["machine", "memory_bytes"]


def memory_bytes() -> int:
    """Return how much memory the machine has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def machine(
    engine: str,
    model: Path,
    instances: int,
    threads: int,
    kv_cache_bytes: int | None,
    spin: str,
    devices: int = 1,
) -> list[Check]:
    """Compare what the settings of ``[engine.<engine>]`` ask for with what the machine has.

    ``threads`` and ``kv_cache_bytes`` are those on each of an instance's ``devices``; ``spin`` is the
    consequence of more threads than CPUs.
    """
    there = (model / "config.json").is_file()
    checks = [
        Check(
            engine,
            there,
            f"model {model}" if there else f"no config.json in {model}",
            "" if there else f"set [engine.{engine}].model to a directory with a Hugging Face model",
        )
    ]
    each = "" if devices == 1 else f"{devices} x "
    cpus, wanted = len(os.sched_getaffinity(0)), instances * devices * threads
    checks.append(
        Check(
            engine,
            wanted <= cpus,
            f"{instances} instances of {each}{threads} threads on {cpus} CPUs",
            "" if wanted <= cpus else f"lower threads or instances: {spin}",
        )
    )
    if kv_cache_bytes is not None:
        memory, needed = memory_bytes(), instances * devices * kv_cache_bytes
        checks.append(
            Check(
                engine,
                needed < memory,
                f"KV caches of {needed / 2**30:.2f} GiB in {memory / 2**30:.1f} GiB of memory",
                "" if needed < memory else "lower kv_cache_bytes or instances",
            )
        )
    return checks
