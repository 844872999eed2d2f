"""Gated delta nets on a CPU, whose states and outputs do not depend on how a sequence is cut into steps.

vLLM has two kernels for them.  One takes the positions of a prefill in pieces of 64, the other the single
position of a decoding step.  They round differently, and so does a prefill that goes on in the middle of a
piece.  The budget of a step cuts prompts by what other requests leave of it, so these would change responses.
vLLM's kernel for drafts takes positions one after the other, however many there are.  All go through it here,
and each is shown to the kernel of the convolution as a request of one position.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
from vllm.model_executor.layers.mamba.ops.cpu.causal_conv1d import causal_conv1d_update_cpu
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata

__all__ = ["install"]


def install() -> None:
    """Compute every position by itself from now on, where there are no drafts."""
    gdn_attention._cpu_gdn_attention_nonspec = compute_one_by_one


def compute_one_by_one(
    layer: Any,
    attn_metadata_i: GDNAttentionMetadata,
    mixed_qkv: Tensor,
    b: Tensor,
    a: Tensor,
    core_attn_out: Tensor,
) -> None:
    """Write the layer's outputs for ``mixed_qkv`` ``[positions, channels]`` into ``core_attn_out``."""
    metadata = attn_metadata_i
    slots, starts = metadata.non_spec_state_indices_tensor, metadata.non_spec_query_start_loc
    assert slots is not None
    assert starts is not None
    requests = metadata.num_decodes + metadata.num_prefills
    positions = metadata.num_decode_tokens + metadata.num_prefill_tokens
    slots, starts = slots[:requests].contiguous(), starts[: requests + 1].contiguous()
    pasts, states = layer.kv_cache
    if not is_conv_state_dim_first():
        pasts = pasts.transpose(1, 2)
    states = states.view(states.shape[0], states.shape[1], states.shape[3], states.shape[2])
    if metadata.has_initial_state is not None:
        fresh = slots[~metadata.has_initial_state[:requests]]
        pasts[fresh] = 0
        states[fresh] = 0
    convolved = _convolve(layer, mixed_qkv[:positions].contiguous(), pasts, slots, starts)
    query, key, value = layer.rearrange_mixed_qkv(convolved)
    most = int((starts[1:] - starts[:-1]).max())
    core_attn_out[:positions] = ops.fused_sigmoid_gating_delta_rule_update_spec_cpu(
        A_log=layer.A_log,
        dt_bias=layer.dt_bias,
        q=query.squeeze(0).contiguous(),
        k=key.squeeze(0).contiguous(),
        v=value.squeeze(0).contiguous(),
        a=a[:positions].contiguous(),
        b=b[:positions].contiguous(),
        initial_state_source=states,
        # Of drafts each would keep its state in a slot of its own; here all have the request's.
        spec_state_indices=slots.to(torch.int32)[:, None].repeat(1, most),
        num_accepted_tokens=torch.ones(requests, dtype=torch.int32),
        cu_seqlens=starts.to(torch.int32),
        use_qk_l2norm_in_kernel=True,
    )


def _convolve(layer: Any, rows: Tensor, states: Tensor, slots: Tensor, starts: Tensor) -> Tensor:
    """Convolve ``rows``, each over those before it in its request, and keep the last ones in ``states``."""
    if len(rows) == len(slots):
        return _convolve_one_each(layer, rows, states, slots)
    past = states.shape[2]
    positions = torch.arange(len(rows))
    # One line of all rows, each request's after the last ones of its past.
    shifts = torch.arange(len(slots)) * past
    first = positions + shifts[torch.searchsorted(starts, positions, right=True) - 1]
    window = torch.arange(past)
    line = rows.new_empty(len(rows) + len(slots) * past, rows.shape[1])
    line[first + past] = rows
    line[(starts[:-1] + shifts)[:, None] + window] = states[slots].transpose(1, 2)
    states[slots] = line[(starts[1:] + shifts)[:, None] + window].transpose(1, 2)
    pasts = line.new_zeros(len(rows) + 1, past, rows.shape[1])
    pasts[1:] = line[first[:, None] + window]
    return _convolve_one_each(layer, rows, pasts.transpose(1, 2), positions + 1)  # slot 0 is of no request


def _convolve_one_each(layer: Any, rows: Tensor, states: Tensor, slots: Tensor) -> Tensor:
    """Convolve each row with the state in its slot, into which it goes."""
    if torch.cpu._is_avx512_bf16_supported() or gdn_attention.is_arm_bf16():
        return ops.causal_conv1d_update_cpu(
            x=rows,
            conv_states=states,
            weight=layer.conv1d.weight,
            bias=layer.conv1d.bias,
            silu_activation=layer.activation == "silu",
            conv_state_indices=slots.to(torch.int32),
            is_weight_packed=True,
        )
    weight = layer.conv1d.weight
    return causal_conv1d_update_cpu(
        rows,
        states,
        weight.view(weight.shape[0], weight.shape[2]),
        layer.conv1d.bias,
        layer.activation,
        conv_state_indices=slots.to(torch.int32),
    )
