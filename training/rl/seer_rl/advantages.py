"""Advantages without a critic: a reward is compared with those of its own group (GRPO, arXiv 2402.03300)."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["group_advantages"]

EPSILON = 1e-6
"""Added to a group's standard deviation."""


def group_advantages(rewards: Sequence[float], *, scale: bool = True) -> list[float]:
    """Return how much better each reward of one group is than the group's mean.

    With ``scale`` that is divided by the group's (population) standard deviation.  Without, a group of nearly
    equal rewards does not weigh as much as one of very different ones (Dr. GRPO, arXiv 2503.20783).  Equal
    rewards have no advantage.  Sums are exact, so the order of the rewards does not matter.
    """
    if not rewards or min(rewards) == max(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    if not scale:
        return [reward - mean for reward in rewards]
    deviation = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards))
    return [(reward - mean) / (deviation + EPSILON) for reward in rewards]
