"""One factor on all step times, such that the twin of a recorded run takes as long as the run did.

A profile is the median of a few steps.  A run has slow steps too, time between steps, and neighbours on its
machine; what all of that adds to a step is one number here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from seer_sim.cost import CostModel

from seer_core.errors import PromptError
from seer_lab.policies import Policy
from seer_lab.simulate import simulate
from seer_lab.twin import Twin

__all__ = ["calibrated", "plugins_of", "slowed"]

CLOSE_ENOUGH = 1e-3
ROUNDS = 5
"""Times grow nearly in proportion to the factor, so two rounds are usual."""


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
    return msgspec.structs.replace(twin, tables={**twin.tables, "engine": engine})


def calibrated(twin: Twin, run: Path) -> tuple[Twin, float]:
    """Return the twin slowed by the factor with which it takes as long as ``run`` did, and that factor.

    Raises:
        PromptError: the run has no summary.
    """
    summary = _summary(run)
    policy = Policy("recorded", plugins_of(run))
    slow, factor = twin, 1.0
    for _ in range(ROUNDS):
        ratio = summary["total_time_s"] / simulate(slow, policy).summary.total_time_s
        if abs(ratio - 1) < CLOSE_ENOUGH:
            break
        factor *= ratio
        slow = slowed(twin, factor)
    return slow, factor


def plugins_of(run: Path) -> tuple[str, ...]:
    """Return the plug-ins of a recorded run."""
    return tuple(plugin["name"] for plugin in _summary(run)["plugins"])


def _summary(run: Path) -> Mapping[str, Any]:
    path = run / "summary.json"
    try:
        summary: Mapping[str, Any] = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError) as error:
        raise PromptError(f"cannot read {path}: {error}; name the directory of a `seer run`") from error
    return summary
