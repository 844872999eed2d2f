"""How fast the machine is between the arms of a comparison, and how far times of arms can be trusted."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from statistics import fmean

from seer_host.machine_probe import MachineProbe, MachineProber

from seer_core.ports.engine import InstanceClient

__all__ = ["FIXED_WORK", "drift_in_words", "mean_wall_s", "probe_machine"]

FIXED_WORK = "fixed_work_s"
"""The name of an arm's figure: the time of the fixed piece of work, before and after the arm."""

STEADY = 0.02
"""A machine whose speed changes by less is called steady."""


async def probe_machine(engines: Collection[InstanceClient]) -> MachineProbe | None:
    """Time a fixed piece of work in the workers of all instances at once, and return the means.

    None where an instance cannot, or is down.
    """
    probers = [each for each in engines if isinstance(each, MachineProber)]
    if not probers or len(probers) < len(engines):
        return None
    found = await asyncio.gather(*(each.probe_machine() for each in probers), return_exceptions=True)
    probes = [each for each in found if isinstance(each, MachineProbe)]
    if len(probes) < len(probers):
        return None
    return MachineProbe(fmean(each.wall_s for each in probes), fmean(each.cpu_s for each in probes))


def mean_wall_s(probes: Sequence[MachineProbe]) -> float:
    """Return how long the fixed piece of work took on average."""
    return fmean(each.wall_s for each in probes)


def drift_in_words(probes: Sequence[MachineProbe]) -> str:
    """Return sentences on how much the machine's speed changed since the first probe, before all arms."""
    first, later = probes[0].wall_s, [each.wall_s for each in probes[1:]]
    drift = max(first, *later) / min(first, *later) - 1
    had = sum(each.cpu_s for each in probes) / sum(each.wall_s for each in probes)
    text = (
        f"The machine: a fixed piece of work in the workers took {first:.2f} s before the first arm and"
        f" {min(later):.2f} to {max(later):.2f} s later, with a core for {min(had, 1.0):.0%} of that time."
    )
    if drift < STEADY:
        return f"{text} Its speed changed by {drift:.1%}, so times can be compared."
    return f"{text} Times of two arms may differ by {drift:.0%} because of the machine alone."
