"""How fast a machine is at the moment: a fixed piece of work, timed where an instance runs."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import msgspec

__all__ = ["MachineProbe", "MachineProber"]


class MachineProbe(msgspec.Struct, frozen=True):
    """How long a fixed piece of work took, which is always the same, in the process of an instance."""

    wall_s: float
    """The seconds that passed."""
    cpu_s: float
    """The seconds in which a processor worked on it; fewer where other programs had the processors."""


@runtime_checkable
class MachineProber(Protocol):
    """The further method of an ``InstanceClient`` that can measure how fast its machine is at the moment."""

    async def probe_machine(self) -> MachineProbe:
        """Time a fixed piece of work in the instance's process; the instance must be idle.

        Raises:
            EngineError: it is busy or down.
        """
        ...
