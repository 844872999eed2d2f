"""Cost constants by name: those fitted to the paper's table, and those fitted to published measurements."""

from __future__ import annotations

from seer_sim.cost import CostModel, sampling_s
from seer_sim.measured import MEASURED

__all__ = ["PRESETS"]

H800_BYTES_PER_S = 3.35e12
"""HBM3 peak of one H800 (data sheet)."""

H800_BF16 = 990e12
"""Dense bf16 peak of one H800, FLOP/s (data sheet)."""

H800_FP8 = 1979e12
"""Dense fp8 peak of one H800, FLOP/s (data sheet)."""

MLA = 512 + 64
"""Values that multi-head latent attention keeps per token and layer: latent and rotary (model cards)."""

REQUEST_S = 20e-6
"""Host's work per request and step in vLLM: some 5 ms of scheduling, inputs and outputs for 256 (assumed)."""


def all_reduce_s(layers: int, hidden: int) -> float:
    """Seconds that a position's activations take between 8 H800: two all-reduces of bf16 per layer.

    A ring sends 2 x 7/8 of the bytes from each GPU; of NVLink's 200 GB/s in each direction (data sheet) 150
    are reached (DeepEP's published 153 on H800).
    """
    return layers * 2 * (2 * 7 / 8) * hidden * 2 / 150e9


def mla_flops(layers: int, heads: int) -> float:
    """FLOPs per position and token of context, latent: scores over 576 values, a sum of 512 of them."""
    return layers * heads * 2 * (MLA + 512)


def mha_flops(layers: int, heads: int, key: int, value: int) -> float:
    """FLOPs per position and token of context with ``heads`` of so many values."""
    return layers * heads * 2 * (key + value)


# Sizes are from the models' cards and config.json.  On H800 efficiencies are fitted and overheads assumed,
# by parts: 2.5 ms of the host's between two steps, 2.5 us for each of 5 kernels per layer (20 where it is a
# mixture), 10 us of latency for each of two all-reduces per layer.  See docs/results/reproduction.md.
PAPER = {
    # examples/tiny_reasoner, float32, vLLM on one CPU thread.  Overhead and FLOP rate are fitted to 517,
    # 3236, 7304 tok/s at batch 1, 8, 32; the bandwidth is that of a core's cache (assumed: 10 MB of weights
    # stay there) and hardly matters.
    "cpu-tiny": CostModel(
        overhead_s=1.84e-3,
        weight_bytes=2.4e6 * 4,
        expert_bytes=0,
        expert_share=1.0,
        kv_bytes_per_token=4 * 2 * (2 * 32) * 4,  # layers x (K, V) x heads x 4 bytes
        flops_per_token=2 * 2.4e6,
        attention_flops=mha_flops(4, 8, 32, 32),
        prefill_attention_flops=mha_flops(4, 8, 32, 32),
        bytes_per_s=100e9,
        flops_per_s=61e9,
        bandwidth_efficiency=1.0,
        compute_efficiency=1.0,
    ),
    "h800-qwen2-vl-72b-tp8": CostModel(
        overhead_s=5e-3,
        weight_bytes=146e9,
        expert_bytes=0,
        expert_share=1.0,
        kv_bytes_per_token=80 * 2 * (8 * 128) * 2,  # layers x (K, V) x heads x bf16
        flops_per_token=2 * 72.7e9,
        attention_flops=mha_flops(80, 64, 128, 128),
        prefill_attention_flops=mha_flops(80, 64, 128, 128),
        bytes_per_s=8 * H800_BYTES_PER_S,
        flops_per_s=8 * H800_BF16,
        bandwidth_efficiency=0.40,
        compute_efficiency=0.40,
        request_s=REQUEST_S,
        position_s=all_reduce_s(80, 8192),
        sampled_s=sampling_s(152_064, H800_BYTES_PER_S),
    ),
    # A dense model on one GPU; its efficiencies are those fitted to the 72 B, its overhead is by parts.
    "h800-qwen2.5-14b": CostModel(
        overhead_s=3.1e-3,
        weight_bytes=29.5e9,
        expert_bytes=0,
        expert_share=1.0,
        kv_bytes_per_token=48 * 2 * (8 * 128) * 2,  # layers x (K, V) x heads x bf16
        flops_per_token=2 * 14.8e9,
        attention_flops=mha_flops(48, 40, 128, 128),
        prefill_attention_flops=mha_flops(48, 40, 128, 128),
        bytes_per_s=H800_BYTES_PER_S,
        flops_per_s=H800_BF16,
        bandwidth_efficiency=0.40,
        compute_efficiency=0.40,
        request_s=REQUEST_S,
        sampled_s=sampling_s(152_064, H800_BYTES_PER_S),
    ),
    # 26 of 27 layers have 64 routed experts of 3 x 2048 x 1408 values, of which a token takes 6.
    "h800-moonlight": CostModel(
        overhead_s=4e-3,
        weight_bytes=32e9 - 26 * 64 * 3 * 2048 * 1408 * 2,
        expert_bytes=26 * 64 * 3 * 2048 * 1408 * 2,
        expert_share=6 / 64,
        kv_bytes_per_token=27 * MLA * 2,
        flops_per_token=2 * 3e9,
        attention_flops=mla_flops(27, 16),
        prefill_attention_flops=mha_flops(27, 16, 192, 128),
        bytes_per_s=H800_BYTES_PER_S,
        flops_per_s=H800_BF16,
        bandwidth_efficiency=0.36,
        compute_efficiency=0.36,
        request_s=REQUEST_S,
        sampled_s=sampling_s(163_840, H800_BYTES_PER_S),
    ),
    # 32 GPUs: attention is data-parallel, so what is no routed expert (11 B of fp8) is on each of them;
    # 60 of 61 layers have 384 routed experts of 3 x 7168 x 2048 values, of which a token takes 8, spread over
    # all GPUs.  The overhead has 71 us of latency per layer for two all-to-alls in it; with 32 ranks, a
    # position of one takes 2.9 us per layer (DeepEP's published times at EP32 and 128 positions: dispatch
    # 155 us and combine 273 us, of which a sixth is taken for latency).
    # Attention computes in bf16, at half of fp8's rate, so its FLOPs count twice.
    "h800-kimi-k2": CostModel(
        overhead_s=10e-3,
        weight_bytes=32 * 10.4e9,
        expert_bytes=60 * 384 * 3 * 7168 * 2048,
        expert_share=8 / 384,
        kv_bytes_per_token=61 * MLA * 2,
        flops_per_token=2 * 32e9,
        attention_flops=2 * mla_flops(61, 64),
        prefill_attention_flops=2 * mha_flops(61, 64, 192, 128),
        bytes_per_s=32 * H800_BYTES_PER_S,
        flops_per_s=32 * H800_FP8,
        bandwidth_efficiency=0.186,
        compute_efficiency=0.186,
        request_s=REQUEST_S / 32,
        position_s=60 * 2.9e-6 / 32,
        sampled_s=sampling_s(163_840, H800_BYTES_PER_S) / 32,
    ),
    # Models that draft.  Qwen2-VL-7B beside the 72 B, on the same GPUs:
    "h800-qwen2-vl-7b-tp8": CostModel(
        overhead_s=3e-3,
        weight_bytes=15.2e9,
        expert_bytes=0,
        expert_share=1.0,
        kv_bytes_per_token=28 * 2 * (4 * 128) * 2,
        flops_per_token=2 * 7.6e9,
        attention_flops=mha_flops(28, 28, 128, 128),
        prefill_attention_flops=mha_flops(28, 28, 128, 128),
        bytes_per_s=8 * H800_BYTES_PER_S,
        flops_per_s=8 * H800_BF16,
        bandwidth_efficiency=0.40,
        compute_efficiency=0.40,
        position_s=all_reduce_s(28, 3584),
        sampled_s=sampling_s(152_064, H800_BYTES_PER_S),
    ),
    # One more layer of Kimi-K2, which predicts the token after the next, with the embedding's matrix.
    "h800-kimi-k2-mtp": CostModel(
        overhead_s=1e-3,
        weight_bytes=32 * (0.15e9 + 1.2e9),
        expert_bytes=384 * 3 * 7168 * 2048,
        expert_share=8 / 384,
        kv_bytes_per_token=MLA * 2,
        flops_per_token=2 * (0.5e9 + 1.2e9),
        attention_flops=2 * mla_flops(1, 64),
        prefill_attention_flops=2 * mha_flops(1, 64, 192, 128),
        bytes_per_s=32 * H800_BYTES_PER_S,
        flops_per_s=32 * H800_FP8,
        bandwidth_efficiency=0.186,
        compute_efficiency=0.186,
        position_s=2.9e-6 / 32,
        sampled_s=sampling_s(163_840, H800_BYTES_PER_S) / 32,
    ),
}

PRESETS = {**PAPER, **{name: each.cost for name, each in MEASURED.items()}}
"""What a step costs, by the names that settings give."""
