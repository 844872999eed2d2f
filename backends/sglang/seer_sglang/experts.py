"""Expert parallelism on a CPU.

SGLang gives an expert of another rank the number -1, for kernels that drop it.  Without its kernels it takes
the number for an index, and fails.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.layers.moe import fused_moe_native
from torch import Tensor

__all__ = ["install"]


def install() -> None:
    """Have each rank compute its own experts alone, in this process."""
    original = fused_moe_native.moe_forward_native

    def forward(layer: Any, x: Tensor, topk_output: Any, moe_runner_config: Any) -> Tensor:
        ids, weights = topk_output.topk_ids, topk_output.topk_weights
        here = ids >= 0
        outputs = x.new_zeros(*ids.shape, x.shape[-1])
        if here.any():
            own = topk_output._replace(topk_ids=ids[here][:, None], topk_weights=weights[here][:, None])
            outputs[here] = original(layer, x[here.nonzero()[:, 0]], own, moe_runner_config)
        return outputs.sum(dim=1)

    fused_moe_native.moe_forward_native = forward
