"""The plug-in ``scripted`` of commands on a cluster: scripted engines, and an observer of any engine's lives.

The observer appends each instance's start and loss to the file that SEER_LIVES names, with the time of the
machine's clock, so that another process can read them as they happen.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct
from seer_host.launcher import Launcher
from seer_worker.client.fleet import ProcessSettings, WorkerFleet
from seer_worker.client.process_client import ProcessClient

from seer_core.model.events import Command, Event, InstanceLost, InstanceStarted
from seer_core.plugins.hookspecs import hookimpl
from seer_core.ports.clock import RealClock
from seer_core.ports.engine import ModelInfo
from seer_core.ports.policy import Observer

__all__ = ["Settings", "install", "seer_make_engines", "seer_make_observer"]

SILENCE_S = 20.0


class Settings(Struct, frozen=True, forbid_unknown_fields=True):
    """``[engine.scripted]``: a step takes ``step_s`` and gives each running chunk a token."""

    instances: int = 2
    step_s: float = 0.02


def install(folder: Path) -> str:
    """Make the plug-in known to commands that have the returned PYTHONPATH; ``folder`` is for this alone."""
    info = folder / "seer_scripted-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: seer-scripted\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[seer]\nscripted = scripted_plugin\n")
    return os.pathsep.join([str(folder), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])


class LivesOfInstances(Observer):
    """Writes a line at each start and each loss."""

    def __init__(self, path: str) -> None:
        self._file = open(path, "a", buffering=1)  # noqa: SIM115  # as long as the process

    def observe(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        """Write what happened to an instance, and where."""
        if isinstance(event, InstanceStarted):
            host, _, _ = event.info.node.rpartition("-")
            self._write(instance=event.info.id, ready=True, host=host)
        elif isinstance(event, InstanceLost):
            self._write(instance=event.instance_id, ready=False, reason=event.reason)

    def _write(self, **line: object) -> None:
        self._file.write(json.dumps({"at_s": time.monotonic(), **line}) + "\n")


@hookimpl
def seer_make_engines(settings: Settings, launcher: Launcher | None) -> WorkerFleet:
    """Return scripted engines in worker processes."""
    local = dict(os.environ) if launcher is None else {}
    launch = ProcessSettings(
        silence_timeout_s=SILENCE_S, start_timeout_s=240.0, stop_timeout_s=5.0, control_timeout_s=120.0
    ).launch(
        "scripted",
        "scripted:Scripted",
        {"step_s": settings.step_s},
        local | {"PYTHONPATH": os.environ["PYTHONPATH"]},
        launcher,
    )
    engines = [ProcessClient(f"scripted-{number}", launch) for number in range(settings.instances)]
    return WorkerFleet(engines, RealClock(), ModelInfo(1 << 17, 1024), None)


@hookimpl
def seer_make_observer() -> Observer | None:
    """Return the observer, if the file is named."""
    path = os.environ.get("SEER_LIVES")
    return None if path is None else LivesOfInstances(path)
