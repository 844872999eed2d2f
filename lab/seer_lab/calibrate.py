"""One factor on all step times, such that the twin of a recorded run takes as long as the run did.

A profile is the median of a few steps.  A run has slow steps too, time between steps, and neighbours on its
machine; what all of that adds to a step is one number here.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from seer_host.json_files import JsonFormat
from seer_sim.cost import CostModel

from seer_core.errors import PromptError
from seer_core.plugins.config_types import Seconds
from seer_lab.policies import PolicySet
from seer_lab.simulate import simulate
from seer_lab.twin import Twin

__all__ = ["calibrated", "plugins_of", "slowed"]

CLOSE_ENOUGH = 1e-3
MOST_FACTOR = 1000.0
"""Between a machine and its profile; real ones are below 2."""

ROUNDS = 5
"""Times grow nearly in proportion to the factor, so two rounds are usual."""


class _Enabled(msgspec.Struct, frozen=True):
    """A plug-in of the recorded run."""

    name: str


class _Recorded(msgspec.Struct, frozen=True):
    """The fields of a run's summary that calibration reads."""

    total_time_s: Seconds
    plugins: tuple[_Enabled, ...]


_SUMMARY = JsonFormat[_Recorded](
    _Recorded, "no summary of a run", "name the directory of a `seer run`", PromptError
)


def slowed(twin: Twin, factor: float) -> Twin:
    """Return a twin of which every step takes ``factor`` times as long."""
    sim = twin.tables["engine"]["sim"]
    cost = msgspec.convert(sim["cost"], CostModel)
    slow = msgspec.structs.replace(
        cost,
        overhead_s=cost.overhead_s * factor,
        request_s=cost.request_s * factor,
        sampled_s=cost.sampled_s * factor,
        position_s=cost.position_s * factor,
        bytes_per_s=cost.bytes_per_s / factor,
        flops_per_s=cost.flops_per_s / factor,
    )
    engine = {"sim": {**sim, "cost": msgspec.structs.asdict(slow)}}
    drafts = sim["acceptance"]
    engine["sim"]["acceptance"] = {**drafts, "step_s": drafts["step_s"] * factor}
    return msgspec.structs.replace(twin, tables={**twin.tables, "engine": engine})


def calibrated(twin: Twin, run: Path) -> tuple[Twin, float]:
    """Return the twin slowed by the factor with which it takes as long as ``run`` did, and that factor.

    Raises:
        PromptError: the run has no summary, or cannot have been on such engines.
    """
    summary = _summary(run)
    policy = PolicySet("recorded", plugins_of(run))
    slow, factor = twin, 1.0
    for _ in range(ROUNDS):
        ratio = summary.total_time_s / simulate(slow, policy).summary.total_time_s
        if abs(ratio - 1) < CLOSE_ENOUGH:
            break
        factor *= ratio
        if not 1 / MOST_FACTOR <= factor <= MOST_FACTOR:
            raise PromptError(
                f"{run} took {factor:.3g} times as long as its twin, so the profile is not of those engines;"
                " measure again: `seer profile CONFIG`"
            )
        slow = slowed(twin, factor)
    return slow, factor


def plugins_of(run: Path) -> tuple[str, ...]:
    """Return the plug-ins of a recorded run."""
    return tuple(plugin.name for plugin in _summary(run).plugins)


def _summary(run: Path) -> _Recorded:
    return _SUMMARY.read(run / "summary.json")
