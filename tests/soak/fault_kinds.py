"""Kinds of faults: the signal, and the processes that it can go to."""

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
from seer_session.runtime import Runtime
from seer_worker.client.engine import WorkerClient
from seer_worker.client.local import LocalWorker

__all__ = ["KINDS", "Fault", "FaultKind", "children", "named", "workers"]

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


def workers() -> list[int]:
    """Return the process ids of this process's descendants that are workers on this machine."""
    return [*named("seer_worker.process.child"), *named("seer worker ")]


def instances(runtime: Runtime) -> list[int]:
    """Return the process ids of the workers that are up."""
    workers = (cast("WorkerClient", engine).worker for engine in runtime.engines.values())
    return [cast("LocalWorker", worker).pid for worker in workers if worker is not None]


@attrs.frozen
class FaultKind:
    """A kind of fault: a signal to one of ``targets``, and with ``pause_s`` SIGCONT after a while in it."""

    targets: Callable[[Runtime], list[int]]
    signal: signal.Signals
    pause_s: tuple[float, float] | None = None

    async def inject(self, runtime: Runtime, chance: random.Random) -> bool:
        """Send the signal to one target; return whether there was one."""
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
    """A fault, so many seconds after the start of its rollout."""

    kind: str
    after_s: float


def of(word: str) -> Callable[[Runtime], list[int]]:
    """Return a function that finds the processes whose command line has this word."""
    return lambda runtime: named(word)


KINDS = {
    "instance killed": FaultKind(instances, signal.SIGKILL),
    "instance terminated": FaultKind(instances, signal.SIGTERM),
    "instance paused": FaultKind(instances, signal.SIGSTOP, SHORT_PAUSE_S),
    "instance hung": FaultKind(instances, signal.SIGSTOP),
    "master killed": FaultKind(of(MASTER), signal.SIGKILL),
    "master paused": FaultKind(of(MASTER), signal.SIGSTOP, SHORT_PAUSE_S),
}
"""By name; those of a master need the pool ``mooncake``."""
