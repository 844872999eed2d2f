"""How far the log-probs of engine and trainer are apart, on the same weights and tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["agreement"]

TAIL = 0.9999


def agreement(engine: Sequence[Tensor], trainer: Sequence[Tensor]) -> dict[str, float]:
    """Return mean, 99.99th percentile and largest difference of log-probs, in nats, over all tokens.

    The percentile is the smallest difference that so many do not exceed.  Without tokens all are 0.
    """
    if not engine:
        return {"dlogp_mean": 0.0, "dlogp_p9999": 0.0, "dlogp_max": 0.0}
    differences = torch.cat(list(engine)).double().sub(torch.cat(list(trainer)).double()).abs()
    differences, _ = differences.sort()
    return {
        "dlogp_mean": differences.mean().item(),
        "dlogp_p9999": differences[math.ceil(TAIL * len(differences)) - 1].item(),
        "dlogp_max": differences[-1].item(),
    }
