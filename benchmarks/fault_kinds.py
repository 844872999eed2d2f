"""The faults of ``faults.py``: what is done to which process, and the processes it can be done to."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import cast

import attrs
import psutil
from seer_host.engine import WorkerEngine
from seer_host.local import LocalWorker

from seer_core.runtime import Runtime

__all__ = ["KINDS", "Fault", "Kind", "children", "named"]

MASTER = "mooncake_master"
SHORT_PAUSE_S = (0.2, 3.0)


def children(pid: int | None = None) -> list[psutil.Process]:
    """Return all living descendants of a process, by default of this one."""
    with suppress(psutil.NoSuchProcess):
        return [
            child
            for child in psutil.Process(pid).children(recursive=True)
            if child.status() != psutil.STATUS_ZOMBIE
        ]
    return []


def named(word: str) -> list[int]:
    """Return the ids of this process's descendants whose command line has this word."""
    found = []
    for child in children():
        with suppress(psutil.NoSuchProcess):
            if any(word in argument for argument in child.cmdline()):
                found.append(child.pid)
    return found


def instances(runtime: Runtime) -> list[int]:
    """Return the process ids of the workers that are up."""
    workers = (cast("WorkerEngine", engine).worker for engine in runtime.fleet.engines.values())
    return [cast("LocalWorker", worker).pid for worker in workers if worker is not None]


@attrs.frozen
class Kind:
    """A kind of fault: a signal to one of ``targets``, and with ``pause_s`` SIGCONT after a while in it."""

    targets: Callable[[Runtime], list[int]]
    signal: signal.Signals
    pause_s: tuple[float, float] | None = None

    async def strike(self, runtime: Runtime, chance: random.Random) -> bool:
        """Do it to one target; return whether there was one."""
        targets = self.targets(runtime)
        if not targets:
            return False
        pid = chance.choice(targets)
        with suppress(ProcessLookupError):
            os.kill(pid, self.signal)
            if self.pause_s is not None:
                await asyncio.sleep(chance.uniform(*self.pause_s))
                os.kill(pid, signal.SIGCONT)
        return True


@attrs.frozen
class Fault:
    """One fault of the plan, so many seconds after its rollout's start."""

    kind: str
    after_s: float


def of(word: str) -> Callable[[Runtime], list[int]]:
    """Return what finds the processes whose command line has this word."""
    return lambda runtime: named(word)


KINDS = {
    "instance killed": Kind(instances, signal.SIGKILL),
    "instance terminated": Kind(instances, signal.SIGTERM),
    "instance paused": Kind(instances, signal.SIGSTOP, SHORT_PAUSE_S),
    "instance hung": Kind(instances, signal.SIGSTOP),
    "master killed": Kind(of(MASTER), signal.SIGKILL),
    "master paused": Kind(of(MASTER), signal.SIGSTOP, SHORT_PAUSE_S),
}
"""By name; those of a master need ``--pools mooncake``."""
