"""How much memory can still be taken here."""

from __future__ import annotations

from pathlib import Path

__all__ = ["available_bytes"]

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
CACHES = ("active_file", "inactive_file")
"""The memory of a cgroup that the kernel frees for others: copies of files."""


def available_bytes() -> int:
    """Return how much memory can still be taken: the machine's, or less where a cgroup allows less."""
    available = _figures(MEMINFO)["MemAvailable:"] << 10
    try:
        limit, used = (int((CGROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
        figures = _figures(CGROUP / "memory.stat")
    except (OSError, ValueError):  # no cgroup v2 here, or no limit ("max")
        return available
    return max(0, min(available, limit - used + sum(figures[name] for name in CACHES)))


def _figures(path: Path) -> dict[str, int]:
    """Return the first two words of each line."""
    return {name: int(value) for name, value, *_ in map(str.split, path.read_text().splitlines())}
