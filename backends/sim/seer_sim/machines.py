"""The cost model of any model on any number of GPUs: its sizes, the GPU's peaks, what is reached of them."""

from __future__ import annotations

import msgspec

from seer_core.plugins.config_types import NotNegative, Positive
from seer_sim.cost import CostModel, sampling_s
from seer_sim.sizes import ModelSizes

__all__ = ["GPUS", "TYPICAL", "GpuPeaks", "Reached", "cost_on", "kv_tokens"]

MEMORY_SHARE = 0.9
"""Part of a GPU's memory that vLLM and SGLang use for weights and KV by default."""

WORKING_BYTES = 3e9
"""Activations and CUDA graphs of one GPU (assumed)."""


class GpuPeaks(msgspec.Struct, frozen=True):
    """Peaks of one GPU by its data sheet; rates are per second, matrices dense."""

    memory_bytes: float
    bytes_per_s: float
    bf16_flops_per_s: float
    fp8_flops_per_s: float
    link_bytes_per_s: float
    """To all other GPUs of a node together, in one direction."""


GPUS = {
    "h100": GpuPeaks(80e9, 3.35e12, 989e12, 1979e12, 450e9),
    "h200": GpuPeaks(141e9, 4.8e12, 989e12, 1979e12, 450e9),
    "h800": GpuPeaks(80e9, 3.35e12, 989e12, 1979e12, 200e9),
    "a100": GpuPeaks(80e9, 2.039e12, 312e12, 312e12, 300e9),
    "b200": GpuPeaks(180e9, 7.7e12, 2250e12, 4500e12, 900e9),
}
"""SXM modules (NVIDIA's data sheets)."""


class Reached(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Shares of a GPU's peaks that engines reach, and the seconds that they add."""

    host_s: NotNegative
    """Between two steps, however large."""
    layer_s: NotNegative
    """The kernels of one layer that wait for nothing but each other: launches and small operations."""
    reduce_s: NotNegative
    """The latency of one all-reduce between GPUs; a layer has two."""
    request_s: NotNegative
    """For one request in a step, its sampling included."""
    mixture_s: NotNegative
    """The same for a layer's routed experts: routing, sorting, gathering."""
    routing_s: NotNegative
    """The same for one position."""
    weights: Positive
    """Of memory's bandwidth, reading weights that every position uses."""
    experts: Positive
    """Of memory's bandwidth, reading routed experts."""
    kv: Positive
    """Of memory's bandwidth, reading KV."""
    compute: Positive
    """Of the peak of computation, in matrices that every position uses."""
    expert_compute: Positive
    """Of the peak of computation, in routed experts."""
    attention: Positive
    """Of bf16's peak, in attention."""
    link: Positive
    """Of the link's bandwidth, in all-reduces."""
    reads_all: bool = False
    """Whether a step reads all routed experts, and not only those that its positions chose."""


TYPICAL = Reached(
    host_s=1.9e-3,
    layer_s=27e-6,
    reduce_s=9e-6,
    request_s=30e-6,
    mixture_s=12e-6,
    routing_s=0.2e-6,
    weights=0.80,
    experts=0.80,
    kv=0.90,
    compute=0.60,
    expert_compute=0.40,
    attention=0.50,
    link=0.50,
)
"""About the medians of what was fitted to published measurements (docs/results/predictions.md)."""


def cost_on(sizes: ModelSizes, gpu: GpuPeaks, gpus: int = 1, reached: Reached = TYPICAL) -> CostModel:
    """Return what a step costs on so many GPUs that share each layer (tensor parallelism).

    A ring all-reduce sends ``2 (n - 1) / n`` of the bytes from each of n GPUs (Patarasu and Yuan, JPDC 69,
    2009).  GPUs divide the KV among its heads; where there are fewer, each copy is read.  A request's windows
    are read in each step, as if they were full, and its states are read and written.  The experts that a step
    touches are counted by ``CostModel``.
    """
    peak = gpu.fp8_flops_per_s if sizes.precision == "fp8" else gpu.bf16_flops_per_s
    mixed = 2 * sizes.expert_weights * sizes.expert_share if sizes.experts else 0.0
    reduces = 2 * sizes.layers if gpus > 1 else 0
    sent = 2 * (gpus - 1) / gpus * sizes.hidden * 2
    position_s = reduces * sent / (gpu.link_bytes_per_s * reached.link)
    if sizes.experts:
        position_s += sizes.layers * reached.routing_s
    overhead_s = reached.host_s + sizes.layers * reached.layer_s + reduces * reached.reduce_s
    if sizes.experts:
        overhead_s += sizes.layers * reached.mixture_s
    sampled_s = min(reached.request_s, sampling_s(sizes.vocabulary, gpu.bytes_per_s))
    copies = gpus / min(gpus, sizes.kv_heads)
    moved_bytes = sizes.window_bytes * copies + 2 * sizes.state_bytes
    return CostModel(
        overhead_s=overhead_s,
        weight_bytes=sizes.weight_bytes,
        expert_bytes=sizes.expert_bytes,
        expert_share=1.0 if reached.reads_all else sizes.expert_share,
        kv_bytes_per_token=sizes.kv_bytes_per_token * copies,
        flops_per_token=2 * sizes.weights,
        expert_flops_per_token=mixed,
        attention_flops=sizes.attention_flops,
        prefill_attention_flops=sizes.prefill_attention_flops,
        bytes_per_s=gpus * gpu.bytes_per_s,
        flops_per_s=gpus * peak,
        bandwidth_efficiency=reached.weights,
        compute_efficiency=reached.compute,
        expert_bandwidth=reached.experts / reached.weights,
        expert_compute=reached.expert_compute / reached.compute,
        kv_bandwidth=reached.kv / reached.weights,
        attention_compute=reached.attention * gpu.bf16_flops_per_s / (reached.compute * peak),
        request_s=reached.request_s - sampled_s + moved_bytes / (gpus * gpu.bytes_per_s * reached.kv),
        position_s=position_s,
        sampled_s=sampled_s,
    )


def kv_tokens(sizes: ModelSizes, gpu: GpuPeaks, gpus: int) -> float:
    """Return the tokens whose KV such an instance holds; below 0 where the weights do not fit.

    Windows and states are left out, since they depend on how many requests run: ``Cluster`` has them.
    """
    embedding = sizes.vocabulary * sizes.hidden * 2
    weights = sizes.weight_bytes + sizes.expert_bytes + embedding
    free = gpus * (gpu.memory_bytes * MEMORY_SHARE - WORKING_BYTES) - weights
    return free / (sizes.kv_bytes_per_token * gpus / min(gpus, sizes.kv_heads))
