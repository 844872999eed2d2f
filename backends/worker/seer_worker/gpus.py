"""The GPUs of this machine as its driver and kernel describe them, and settings that do not fit them.

PyTorch is not asked: importing it takes seconds, and it may be in another environment.
"""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from seer_core.plugins.hookspecs import Check

__all__ = ["Gpu", "gpus", "hardware", "placement", "visible_devices"]

FIELDS = "index,name,memory.total,memory.free"
LEAST_DRIVERS = {"12": 525, "13": 580}
"""The oldest driver that runs each CUDA (NVIDIA's table of minor-version compatibility)."""
RUNTIMES = {"nvidia-cuda-runtime": "13", "nvidia-cuda-runtime-cu12": "12"}
"""The packages that bring ``libcudart.so``, and its major version."""


class Gpu(NamedTuple):
    """One GPU: its number, its name, and its memory in bytes."""

    number: int
    name: str
    total_bytes: int
    free_bytes: int


def gpus() -> list[Gpu]:
    """Return the GPUs that ``nvidia-smi`` lists; none where it is not, or does not answer."""
    found = []
    for line in _smi(f"--query-gpu={FIELDS}", "--format=csv,noheader,nounits").splitlines():
        number, name, *memory = (part.strip() for part in line.split(","))
        try:
            total, free = (int(part) << 20 for part in memory)
        except ValueError:  # "[N/A]", where a GPU shares the machine's memory
            total = free = 0
        found.append(Gpu(int(number), name, total, free))
    return found


def visible_devices(environment: Mapping[str, str], all_devices: Sequence[str]) -> Sequence[str]:
    """Return the devices that an environment lets a process see, of which it may name none."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return all_devices
    names = [name.strip() for name in visible.split(",")]
    return [] if names[0] in ("", "-1") else names


def hardware(part: str, root: Path = Path("/")) -> list[Check]:
    """Describe driver, GPUs, CUDA's libraries, NVLink and RDMA; nothing on a machine without a driver."""
    try:
        words = (root / "proc/driver/nvidia/version").read_text().split("\n")[0].split()
    except OSError:
        return []
    driver = next((word for word in words if word[0].isdigit() and "." in word), "of unknown version")
    there = gpus()
    checks = [
        Check(
            part,
            bool(there),
            f"driver {driver}, {len(there)} GPUs",
            "" if there else "`nvidia-smi` lists no GPU: install NVIDIA's tools, or give this container one",
        )
    ]
    for gpu in there:
        memory = f"{gpu.free_bytes / 2**30:.1f} of {gpu.total_bytes / 2**30:.1f} GiB free"
        checks.append(Check(part, True, f"GPU {gpu.number}: {gpu.name}, {memory}", ""))
    checks += [_runtime(part, driver)]
    links = _smi("nvlink", "--status").count("GB/s")
    checks.append(Check(part, True, f"{links} NVLinks that are up", ""))
    ports = [_port(path) for path in sorted((root / "sys/class/infiniband").glob("*/ports/*"))]
    checks.append(Check(part, True, f"RDMA: {', '.join(ports) or 'no device'}", ""))
    return checks


def placement(
    engine: str,
    instances: int,
    each: int,
    kv_cache_bytes: int | None,
    share: float | None,
    environment: Mapping[str, str],
    there: Sequence[Gpu],
) -> list[Check]:
    """Refuse settings of ``[engine.<engine>]`` for which these GPUs are too few or too small.

    Args:
        engine: its name.
        instances: how many instances there are.
        each: the devices of an instance.
        kv_cache_bytes: the KV on each device, if it is set.
        share: the part of a device's memory that the engine takes at a start, if it is set.
        environment: the variables that workers inherit.
        there: the GPUs of the machine.
    """
    needed = instances * each
    names = visible_devices(environment, [str(gpu.number) for gpu in there])
    if len(names) < needed:
        remedy = "name GPUs in CUDA_VISIBLE_DEVICES, or unset it"
        if names:
            both = f"{names[0]},{names[0]}"
            remedy = f"lower instances; two of them share a GPU with CUDA_VISIBLE_DEVICES={both}"
        return [Check(engine, False, f"{needed} devices of {len(names)} GPUs that are visible", remedy)]
    used = Counter(names[:needed])
    checks = [Check(engine, True, f"{needed} devices on {len(used)} GPUs", "")]
    most = max(used.values())
    if most > 1 and (share is None or share * most > 1):
        remedy = f"set engine_args = {{ gpu_memory_utilization = {0.9 / most:.2f} }}"
        finding = f"{most} instances share a GPU, of whose memory each wants {share or 'nearly all'}"
        checks.append(Check(engine, False, finding, remedy))
    by_name = {str(gpu.number): gpu for gpu in there}
    for name, count in used.items():
        gpu = by_name.get(name)  # a device may be named by its UUID
        wanted = (kv_cache_bytes or 0) * count
        if gpu is not None and gpu.total_bytes and wanted >= gpu.total_bytes:
            finding = (
                f"KV caches of {wanted / 2**30:.2f} GiB on GPU {name} of {gpu.total_bytes / 2**30:.1f} GiB"
            )
            checks.append(Check(engine, False, finding, "lower kv_cache_bytes or instances"))
    return checks


def _runtime(part: str, driver: str) -> Check:
    """Compare the driver with the CUDA that PyTorch here was built for."""
    versions = {}
    for package, major in RUNTIMES.items():
        try:
            versions[major] = version(package)
        except PackageNotFoundError:
            continue
    found = ", ".join(f"libcudart.so.{major} ({which})" for major, which in versions.items())
    branch = driver.partition(".")[0]
    late = [major for major in versions if branch.isdigit() and int(branch) < LEAST_DRIVERS[major]]
    remedy = f"CUDA {late[0]} needs driver {LEAST_DRIVERS[late[0]]} or later: update it" if late else ""
    return Check(part, not late, found or "no CUDA library in this environment", remedy)


def _port(path: Path) -> str:
    """Return a port of an RDMA device as ``mlx5_0/1 active at 400 Gb/sec (4X NDR)``."""
    try:
        state = (path / "state").read_text().partition(":")[2].strip().lower()
        rate = (path / "rate").read_text().strip()
    except OSError:
        state, rate = "unreadable", "unknown rate"
    return f"{path.parents[1].name}/{path.name} {state} at {rate}"


def _smi(*arguments: str) -> str:
    """Return what ``nvidia-smi`` prints; nothing where it fails."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
