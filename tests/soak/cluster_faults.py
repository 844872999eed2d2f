"""Faults of a cluster: parts of a machine, whole machines, their network, the head and the driver."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from statistics import median
from typing import Any

import attrs
import psutil

__all__ = [
    "DRIVER_KINDS",
    "HEAD_AND_WORKERS",
    "HEAD_KINDS",
    "KINDS",
    "MASTER",
    "ClusterFault",
    "MachineFault",
    "rows_of",
]

BRIEF_S = (0.5, 4.0)
HEALED_S = (16.0, 30.0)
"""How long a machine is cut off that comes back; a connection is given up after 15 s."""
DRIVER_KINDS = {"driver killed": signal.SIGKILL, "driver terminated": signal.SIGTERM}
HEAD = "head killed"
HEAD_AND_WORKERS = "head and all workers killed"
HEAD_KINDS = (HEAD, HEAD_AND_WORKERS)
MASTER = "Mooncake's master killed"


@attrs.frozen
class MachineFault:
    """A kind of fault that strikes a machine; ``odds`` are of its being chosen.

    ``breaks``: the machine is no use afterwards.  ``cut_s``: it comes back so long after it was cut off.
    ``loses``: the instance there has to be lost.
    """

    strike: Callable[[Any], None]
    odds: int
    breaks: bool = False
    loses: bool = True
    cut_s: tuple[float, float] | None = None
    namespaces: bool = False


def _signal(part: str, number: signal.Signals) -> Callable[[Any], None]:
    def strike(machine: Any) -> None:
        for process in machine.processes(part):
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    return strike


RAYLET, SUPERVISOR, WORKER = "raylet/raylet", "ray::Supervisor", "seer_worker.process"
"""What the command lines of a node's processes have in them."""

KINDS = {
    "worker killed": MachineFault(_signal(WORKER, signal.SIGKILL), 4),
    "worker stopped": MachineFault(_signal(WORKER, signal.SIGSTOP), 1),
    "actor killed": MachineFault(_signal(SUPERVISOR, signal.SIGKILL), 4),
    "raylet killed": MachineFault(_signal(RAYLET, signal.SIGKILL), 3, breaks=True),
    "raylet terminated": MachineFault(_signal(RAYLET, signal.SIGTERM), 2, breaks=True),
    "machine killed": MachineFault(lambda machine: machine.kill(), 4, breaks=True, namespaces=True),
    "machine cut off": MachineFault(lambda machine: machine.cut(), 2, breaks=True, namespaces=True),
    "machine cut off and healed": MachineFault(
        lambda machine: machine.cut(), 3, breaks=True, cut_s=HEALED_S, namespaces=True
    ),
    "machine cut off briefly": MachineFault(
        lambda machine: machine.cut(), 3, loses=False, cut_s=BRIEF_S, namespaces=True
    ),
}
"""By name; those with ``namespaces`` need machines of their own."""


@attrs.define
class ClusterFault:
    """A fault: what it struck and when, and when its loss was noticed and made good, on the machine's clock.

    ``instance`` was ready there; without one the fault struck a start.
    """

    kind: str
    struck_s: float
    machine: str = ""
    instance: str | None = None
    noticed_s: float | None = None
    recovered_s: float | None = None


def rows_of(faults: list[ClusterFault]) -> Iterator[dict[str, Any]]:
    """Yield a row for each kind: how many, how many were losses, seconds to notice and to recover."""
    for kind in (*KINDS, *DRIVER_KINDS, *HEAD_KINDS, MASTER):
        found = [each for each in faults if each.kind == kind]
        if found:
            lost = [each for each in found if each.noticed_s is not None]
            yield {
                "kind": kind,
                "faults": len(found),
                "losses": len(lost),
                "noticed_s": _spread(each.noticed_s - each.struck_s for each in lost if each.noticed_s),
                "recovered_s": _spread(
                    each.recovered_s - each.noticed_s
                    for each in lost
                    if each.noticed_s and each.recovered_s is not None
                ),
            }


def _spread(values: Iterator[float]) -> dict[str, float] | None:
    found = sorted(values)
    return {"median": median(found), "most": found[-1]} if found else None
