"""The devices, the environment and the engine's arguments that a plug-in gives to its workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from seer_core.errors import ConfigError

__all__ = ["refuse_arguments", "share_devices", "worker_environment"]


def share_devices(
    engine: str, instances: int, environment: Mapping[str, str], each: int = 1
) -> list[Sequence[str]]:
    """Return each instance's slice of the visible devices, in order; empty ones where none are visible.

    Raises:
        ConfigError: there are fewer than ``each`` for every instance.
    """
    needed = each * instances
    inherited = environment.get("CUDA_VISIBLE_DEVICES")
    if inherited is None:
        devices = [str(index) for index in range(needed)]
    elif inherited.strip() in ("", "-1"):
        return [()] * instances
    else:
        devices = inherited.split(",")
    if len(devices) < needed:
        raise ConfigError(
            f"engine.{engine}: {instances} instances of {each} devices need {needed}, visible are"
            f" {len(devices)}; lower instances{' or tensor_parallel' if each > 1 else ''}"
        )
    return [devices[start : start + each] for start in range(0, needed, each)]


def worker_environment(
    environment: Mapping[str, str], threads: int, devices: Sequence[str], **own: str
) -> dict[str, str]:
    """Return the environment of a worker: offline, on these devices, with what the engine sets of its own."""
    return {
        **environment,
        "CUDA_VISIBLE_DEVICES": ",".join(devices),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(threads),
        "TRANSFORMERS_OFFLINE": "1",
        **own,
    }


def refuse_arguments(engine: str, given: Mapping[str, Any], decided: Mapping[str, str]) -> None:
    """Refuse arguments of the engine that a setting, or Seer itself, decides; ``decided`` has the reasons.

    Raises:
        ConfigError: one of them is given.
    """
    for name in decided:
        if name in given:
            raise ConfigError(f"engine.{engine}.engine_args.{name} cannot be set: {decided[name]}")
