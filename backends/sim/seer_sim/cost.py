"""What a step costs: a roofline with a fixed overhead, and its constants by name.

    step = overhead + max(bytes read / effective bandwidth, FLOPs / effective FLOP rate)

Left out: attention's FLOPs (under the roofline in decoding; 5 % of an 8 k prefill of a 72 B model),
collectives other than as part of the overhead, sampling, and the host.
"""

from __future__ import annotations

from math import ceil
from typing import Annotated

import msgspec
from msgspec import Meta

__all__ = ["PRESETS", "CostModel"]

Positive = Annotated[float, Meta(gt=0)]
Share = Annotated[float, Meta(gt=0, le=1)]


class CostModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Constants of one model on one instance (all its accelerators together).

    ``active_share`` of the weights serves one token (1 for a dense model); with uniform routing a
    step of n tokens reads ``1 - (1 - active_share) ** n`` of them.  ``bytes_per_s`` and
    ``flops_per_s`` are peaks; the efficiencies are what is reached of them.
    """

    overhead_s: Annotated[float, Meta(ge=0)]
    weight_bytes: Positive
    active_share: Share
    kv_bytes_per_token: Positive
    flops_per_token: Positive
    bytes_per_s: Positive
    flops_per_s: Positive
    bandwidth_efficiency: Share
    compute_efficiency: Share

    def steps_s(self, tokens: int, context_tokens: float, growth_tokens: float, steps: int) -> float:
        """Return the seconds that ``steps`` steps take, each computing ``tokens`` positions.

        The first reads the KV of ``context_tokens``, each later one ``growth_tokens`` more; so
        memory time grows in a line and compute time is constant: compute-bound steps come first.
        """
        bandwidth = self.bytes_per_s * self.bandwidth_efficiency
        weights = self.weight_bytes * (1.0 - (1.0 - self.active_share) ** tokens)
        memory_s = (weights + self.kv_bytes_per_token * context_tokens) / bandwidth
        growth_s = self.kv_bytes_per_token * growth_tokens / bandwidth
        compute_s = self.flops_per_token * tokens / (self.flops_per_s * self.compute_efficiency)
        computing = 0
        if compute_s > memory_s:
            if growth_s * (steps - 1) <= compute_s - memory_s:
                computing = steps
            else:
                computing = ceil((compute_s - memory_s) / growth_s)
        reading = steps - computing
        # The reading steps are number ``computing`` to ``steps - 1``; their numbers add up to:
        numbers = reading * (computing + steps - 1) / 2
        return steps * self.overhead_s + computing * compute_s + reading * memory_s + numbers * growth_s


H800_BYTES_PER_S = 3.35e12
"""HBM3 peak of one H800 (data sheet)."""

H800_FLOPS_PER_S = 990e12
"""Dense bf16 peak of one H800 (data sheet)."""

PRESETS = {
    # Qwen3 of 2.4 M parameters, float32, one CPU thread.  Overhead and FLOP rate are fitted to vLLM's
    # 517, 3236, 7304 tok/s at batch 1, 8, 32; the bandwidth is that of a core's cache (assumed:
    # 10 MB of weights stay there) and hardly matters.
    "cpu-tiny": CostModel(
        overhead_s=1.84e-3,
        weight_bytes=2.4e6 * 4,
        active_share=1.0,
        kv_bytes_per_token=4 * 2 * (2 * 32) * 4,  # layers x (K, V) x heads x 4 bytes
        flops_per_token=2 * 2.4e6,
        bytes_per_s=100e9,
        flops_per_s=61e9,
        bandwidth_efficiency=1.0,
        compute_efficiency=1.0,
    ),
    # Sizes from the model cards.  Overhead and efficiencies are fitted, for this model and the next,
    # so that the paper's veRL run comes out within 10 % (arXiv 2511.14617; see the README).
    "h800-qwen2-vl-72b-tp8": CostModel(
        overhead_s=10e-3,
        weight_bytes=146e9,
        active_share=1.0,
        kv_bytes_per_token=80 * 2 * (8 * 128) * 2,  # layers x (K, V) x heads x bf16
        flops_per_token=2 * 72.7e9,
        bytes_per_s=8 * H800_BYTES_PER_S,
        flops_per_s=8 * H800_FLOPS_PER_S,
        bandwidth_efficiency=0.4,
        compute_efficiency=0.5,
    ),
    "h800-moonlight": CostModel(
        overhead_s=8e-3,
        weight_bytes=32e9,
        active_share=3 / 16,
        kv_bytes_per_token=27 * 576 * 2,  # layers x MLA's values x bf16
        flops_per_token=2 * 3e9,
        bytes_per_s=H800_BYTES_PER_S,
        flops_per_s=H800_FLOPS_PER_S,
        bandwidth_efficiency=0.4,
        compute_efficiency=0.5,
    ),
}
