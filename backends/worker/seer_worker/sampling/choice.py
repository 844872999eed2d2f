"""Keyed sampling by the kernels of ``fused`` where they can run, and by PyTorch's elsewhere: equal tokens."""

from __future__ import annotations

from torch import Tensor

from seer_worker.sampling.fused import fused_choices, usable
from seer_worker.sampling.keyed import keyed_choices

__all__ = ["chosen_by_key"]


def chosen_by_key(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    seeds: Tensor,
    positions: Tensor,
    min_p: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return ``keyed_choices``, and the tokens' raw log-probs, float32 [rows], if kernels made them."""
    if usable(logits):
        return fused_choices(logits, temperature, top_k, top_p, seeds, positions, min_p)
    return keyed_choices(logits, temperature, top_k, top_p, seeds, positions, min_p), None
