"""The devices, the environment and the engine's arguments that a plug-in gives to its workers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from seer_host.launcher import Launcher

from seer_core.errors import ConfigError
from seer_worker.gpus import visible_devices

__all__ = ["inherited", "refuse_arguments", "share_devices", "worker_environment"]


def share_devices(
    engine: str,
    instances: int,
    environment: Mapping[str, str],
    each: int = 1,
    *,
    launcher: Launcher | None = None,
) -> Sequence[Sequence[str] | None]:
    """Return each instance's slice of the visible devices, in order; empty ones where none are visible.

    A ``launcher`` gives devices where the worker runs: then there is None for each.

    Raises:
        ConfigError: there are fewer than ``each`` for every instance.
    """
    if launcher is not None:
        return [None] * instances
    needed = each * instances
    devices = visible_devices(environment, [str(index) for index in range(needed)])
    if not devices:
        return [()] * instances
    if len(devices) < needed:
        raise ConfigError(
            f"engine.{engine}: {instances} instances of {each} devices need {needed}, visible are"
            f" {len(devices)}; lower instances{' or tensor_parallel' if each > 1 else ''}"
        )
    return [devices[start : start + each] for start in range(0, needed, each)]


def inherited(launcher: Launcher | None) -> Mapping[str, str]:
    """Return the variables that a worker has of this process: all, or none where a launcher starts it."""
    return os.environ if launcher is None else {}


def worker_environment(
    environment: Mapping[str, str], threads: int, devices: Sequence[str] | None, **own: str
) -> dict[str, str]:
    """Return the environment of a worker: offline, on these devices, with what the engine sets of its own.

    Without ``devices`` it is left with those that its launcher gives it.
    """
    visible = {} if devices is None else {"CUDA_VISIBLE_DEVICES": ",".join(devices)}
    return {
        "OPENBLAS_NUM_THREADS": "1",  # numpy starts its threads at import, and with threads nothing is forked
        **environment,
        **visible,
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
