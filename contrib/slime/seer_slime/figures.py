"""The figures of a batch in slime's log, summed over the rollouts that it takes: ``rollout/seer/...``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from seer_session import Summary

__all__ = ["figures_of"]

LEVELS = ("distributed", "reproducible", "exact")
SUMMED = (
    "requests",
    "tokens",
    "total_time_s",
    "tail_time_s",
    "chunks",
    "migrations",
    "cached_tokens",
    "prefilled_tokens",
    "recomputed_tokens",
    "instances_lost",
)


def figures_of(summaries: Sequence[Summary]) -> dict[str, float]:
    """Return the figures of a batch; none where no rollout has ended with Seer.

    More than one rollout makes a batch where a filter drops groups.
    """
    if not summaries:
        return {}
    found = {name: float(sum(getattr(each, name) for each in summaries)) for name in SUMMED}
    work = sum(each.throughput_tokens_per_s * each.total_time_s for each in summaries)
    total_s = found["total_time_s"]
    found["throughput_tokens_per_s"] = work / total_s if total_s else 0.0
    found["exactness"] = float(min(LEVELS.index(each.exactness) for each in summaries))
    return {f"rollout/seer/{name}": value for name, value in found.items()}
