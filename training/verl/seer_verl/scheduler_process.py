"""The process in which the scheduler lives, which is ended here when it is hung.

Ray asks an actor to end, and one that does not answer, such as a stopped process, stays for minutes.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

__all__ = ["SchedulerProcess", "end_process", "process_of"]

STARTED = 19
"""The field of ``/proc/PID/stat`` with a process's start, counted behind its name; see proc(5)."""


@attrs.frozen
class SchedulerProcess:
    """A process of a node of Ray's."""

    node: str
    pid: int
    started: str
    """In ticks after the node's start: no other process of this number has it."""


def process_of(_: Any) -> SchedulerProcess | None:
    """Return the process of the actor in which this is called; none outside Ray."""
    if not ray.is_initialized():
        return None
    return SchedulerProcess(ray.get_runtime_context().get_node_id(), os.getpid(), _started(os.getpid()))


async def end_process(process: SchedulerProcess) -> None:
    """End a process, wherever it is.

    Raises:
        RayError: its node is not to be had.
    """
    where = NodeAffinitySchedulingStrategy(node_id=process.node, soft=False)
    await ray.remote(num_cpus=0, scheduling_strategy=where)(_end).remote(process)


def _end(process: SchedulerProcess) -> None:
    with suppress(OSError):  # it is over
        if _started(process.pid) == process.started:
            os.kill(process.pid, signal.SIGKILL)


def _started(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[STARTED]
