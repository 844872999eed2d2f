"""The cost of a step: rooflines with a fixed overhead.

    step = overhead + max(weight bytes / bandwidth, FLOPs of its positions / FLOP rate)
                    + max(bytes of the experts touched / bandwidth, their FLOPs / FLOP rate)
                    + the sum over its requests of max(KV bytes / bandwidth, attention FLOPs / FLOP rate)
                    + so much per request, per position, and per position that is sampled

The layers' matrices, routed experts and attention are different kernels, one after the other, so each is
bound by what it needs most of itself.  All are effective rates: peaks times what is reached of them.  Where
``expert_flops_per_token`` is 0, experts and other matrices have one roofline together.

Left out: that the slowest of several data-parallel ranks holds up the others (all of an instance's memory and
bandwidth count as one), other than in what is reached of the peaks.
"""

from __future__ import annotations

from functools import cached_property
from typing import Annotated

import msgspec
from msgspec import Meta

from seer_core.plugins.config_types import NotNegative, Positive

__all__ = ["CostModel", "sampling_s"]

Share = Annotated[float, Meta(gt=0, le=1)]


class CostModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """Constants of one model on one instance, all its accelerators together; seconds, bytes, FLOPs."""

    overhead_s: NotNegative
    """The fixed time of a step."""
    weight_bytes: Positive
    """The weights that each step reads, as often as they are replicated; without the routed experts."""
    expert_bytes: NotNegative
    """The routed experts of a mixture of experts."""
    expert_share: Share
    """Experts per token over experts. Of n positions that choose at random, a step reads ``1 - (1 -
    expert_share) ** n`` of ``expert_bytes``.
    """
    kv_bytes_per_token: Positive
    """The KV of one token."""
    flops_per_token: Positive
    """The work of the layers' matrices for one position."""
    attention_flops: NotNegative
    """The work of attention for each position and token of its context."""
    prefill_attention_flops: NotNegative
    """The work of attention, for each position and token of context, while a context is computed; MLA then
    works on unfolded keys and values.
    """
    bytes_per_s: Positive
    """The peak bandwidth of memory."""
    flops_per_s: Positive
    """The peak rate of computation."""
    bandwidth_efficiency: Share
    """The share of the peak bandwidth that is reached."""
    compute_efficiency: Share
    """The share of the peak rate of computation that is reached."""
    request_s: NotNegative = 0.0
    """The host's work for one request in a step."""
    position_s: NotNegative = 0.0
    """The time that a position's activations take between accelerators."""
    sampled_s: NotNegative = 0.0
    """The sampler's work for one position; a decoding request has one, and one more per draft token."""
    expert_flops_per_token: NotNegative = 0.0
    """The work of the routed experts for one position, where they have a roofline of their own; 0 where
    ``flops_per_token`` has it.
    """
    expert_bandwidth: Positive = 1.0
    """What reading routed experts reaches of the bandwidth, over what reading other weights does."""
    expert_compute: Positive = 1.0
    """What routed experts reach of the peak of computation, over what other matrices do."""
    kv_bandwidth: Positive = 1.0
    """What reading KV reaches of the bandwidth, over what reading weights does."""
    attention_compute: Positive = 1.0
    """What attention reaches of the peak of computation, over what matrices do."""

    def pass_s(self, positions: float, requests: int = 0, sampled: float = 0) -> float:
        """Return the seconds of a step that computes so many positions, attention excepted.

        They are those of so many ``requests``, and so many of them are ``sampled``.
        """
        host_s = self.overhead_s + self.request_s * requests + self.sampled_s * sampled
        host_s += self.position_s * positions
        if not self.expert_flops_per_token:
            return host_s + max(self.weights_s(positions), self.layer_s * positions)
        matrices_s = max(self.weight_bytes / self._bandwidth, self.layer_s * positions)
        return host_s + matrices_s + max(self._experts_s(positions), self._expert_layer_s * positions)

    def weights_s(self, positions: float) -> float:
        """Return the seconds in which a step of so many positions reads the weights."""
        return self.weight_bytes / self._bandwidth + self._experts_s(positions)

    def _experts_s(self, positions: float) -> float:
        touched: float = 1.0 - (1.0 - self.expert_share) ** positions
        return self.expert_bytes * touched / (self._bandwidth * self.expert_bandwidth)

    @cached_property
    def _expert_layer_s(self) -> float:
        return self.expert_flops_per_token / (self._flop_rate * self.expert_compute)

    @cached_property
    def layer_s(self) -> float:
        """The seconds that the layers' matrices take to compute one position, routed experts of their own not
        counted.
        """
        return self.flops_per_token / self._flop_rate

    def attention_s(self, positions: float) -> float:
        """Return the seconds per token of context of a decoding request that computes ``positions``."""
        read_s = self.kv_bytes_per_token / self._kv_rate
        return max(read_s, positions * self.attention_flops / self._attention_rate)

    def prefill_attention_s(self, before: int, tokens: int) -> float:
        """Return the seconds that attention takes for ``tokens`` more of a context after ``before``."""
        read_s = self.kv_bytes_per_token * (before + tokens) / self._kv_rate
        pairs = tokens * (before + tokens / 2)
        return max(read_s, self.prefill_attention_flops * pairs / self._attention_rate)

    def at_speed(self, speed: float) -> CostModel:
        """Return the costs of a machine that is so many times as fast, in all that it does."""
        slower = ("overhead_s", "request_s", "position_s", "sampled_s")
        faster = ("bytes_per_s", "flops_per_s")
        return msgspec.structs.replace(
            self,
            **{name: getattr(self, name) / speed for name in slower},
            **{name: getattr(self, name) * speed for name in faster},
        )

    @cached_property
    def _bandwidth(self) -> float:
        return self.bytes_per_s * self.bandwidth_efficiency

    @cached_property
    def _flop_rate(self) -> float:
        return self.flops_per_s * self.compute_efficiency

    @cached_property
    def _kv_rate(self) -> float:
        return self._bandwidth * self.kv_bandwidth

    @cached_property
    def _attention_rate(self) -> float:
        return self._flop_rate * self.attention_compute


def sampling_s(vocabulary: int, bytes_per_s: float) -> float:
    """Seconds in which a position's fp32 logits are read or written ten times (assumed), at half the peak."""
    return 10 * vocabulary * 4 / (bytes_per_s / 2)
