"""Expert parallelism on a CPU.

vLLM's kernel of experts for CPUs takes the number of an expert for its place on this rank, though vLLM passes
it a map of the places.  It reads past the end of the rank's weights, and the rank dies or computes nonsense.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

__all__ = ["install"]

_apply = CPUUnquantizedExperts.apply


def install() -> None:
    """Have experts of other ranks count for nothing in every step from now on."""
    patched: Any = CPUUnquantizedExperts
    patched.apply = _apply_here


def _apply_here(
    self: CPUUnquantizedExperts,
    topk_weights: Tensor,
    topk_ids: Tensor,
    expert_map: Tensor | None,
    **others: Any,
) -> None:
    if expert_map is not None:
        places = expert_map[topk_ids.long()].to(topk_ids.dtype)
        topk_weights, topk_ids = topk_weights.where(places >= 0, 0), places.clamp(min=0)
    _apply(self, topk_weights=topk_weights, topk_ids=topk_ids, expert_map=expert_map, **others)
