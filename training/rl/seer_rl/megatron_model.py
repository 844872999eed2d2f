"""A rank's part of Megatron-core's ``GPTModel``, on GPUs or a CPU.

What of Megatron-core 0.16 stands in the way of a CPU: it asks for the current CUDA device, makes small
tensors on it, and looks for CUDA's types and random states.  It is answered with the CPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import random
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from seer_rl.batches import MicroBatch

__all__ = ["build", "emulate_cuda_on_cpu", "forward", "logprobs"]


class _OnCpu(TorchFunctionMode):
    """Makes on the CPU what is to be made on a CUDA device, and calls types by CUDA's names."""

    def __torch_function__(
        self,
        function: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if function is Tensor.cuda:
            return args[0]
        named = dict(kwargs or {})
        if str(named.get("device")).startswith("cuda"):
            named["device"] = "cpu"
        answer = function(*args, **named)
        if function is Tensor.type and isinstance(answer, str):
            return answer.replace("torch.", "torch.cuda.")
        return answer


def emulate_cuda_on_cpu() -> None:
    """Let Megatron-core take this process's CPU for a CUDA device, for good."""
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.synchronize = lambda *_, **__: None
    cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.manual_seed = torch.manual_seed
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    _OnCpu().__enter__()  # type: ignore[no-untyped-call]


class _CoreAttention(torch.nn.Module):
    """Causal attention by torch's kernel; made by Megatron-core, hence the arguments.

    Megatron-core's own makes matrices of [heads, length, length], and is 20 times further from transformers'
    log-probs.
    """

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *_: Any,
        packed_seq_params: PackedSeqParams | None = None,
        **__: Any,
    ) -> Tensor:
        """Attend: [length, batch, heads, size] in, [length, batch, heads * size] out.

        Packed, there is no batch: [length, heads, size] in and out.
        """
        if packed_seq_params is None:
            query, key, value = (each.permute(1, 2, 0, 3) for each in (query, key, value))
            return _attend(query, key, value).permute(2, 0, 1, 3).flatten(2)
        ends: list[int] = packed_seq_params.cu_seqlens_q.tolist()
        sizes = [end - begin for begin, end in pairwise(ends)]
        heads = (each.transpose(0, 1) for each in (query, key, value))
        parts = zip(*(torch.split(each, sizes, 1) for each in heads), strict=True)
        return torch.cat([_attend(*(each[None] for each in part))[0] for part in parts], 1).transpose(0, 1)


def _attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend: [batch, heads, length, size] in and out; several heads of queries share one of keys."""
    siblings = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(siblings, dim=1) for each in (key, value))
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def build(config: Any, device: torch.device) -> Any:
    """Return this rank's part of a dense Qwen3 model of transformers' config, in float32."""
    spec = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=True)
    spec.submodules.self_attention.submodules.core_attention = _CoreAttention
    model = GPTModel(
        TransformerConfig(
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            ffn_hidden_size=config.intermediate_size,
            num_attention_heads=config.num_attention_heads,
            num_query_groups=config.num_key_value_heads,
            kv_channels=config.head_dim,
            layernorm_epsilon=config.rms_norm_eps,
            normalization="RMSNorm",
            qk_layernorm=True,
            gated_linear_unit=True,
            activation_func=F.silu,
            add_bias_linear=False,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            params_dtype=torch.float32,
            pipeline_dtype=torch.float32,
            tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
            pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
            variable_seq_lengths=True,  # micro-batches differ in their shapes
            moe_token_dispatcher_type="alltoall",  # no experts, but the default refuses the former
            calculate_per_token_loss=True,  # gradients are summed; the loss is a share of the batch's mean
            deterministic_mode=True,
            use_cpu_initialization=True,
            bias_dropout_fusion=False,
            gradient_accumulation_fusion=False,
            masked_softmax_fusion=False,
        ),
        spec,
        vocab_size=config.vocab_size,
        max_sequence_length=config.max_position_embeddings,
        position_embedding_type="rope",
        rotary_base=config.rope_parameters["rope_theta"],
        share_embeddings_and_output_weights=config.tie_word_embeddings,
        parallel_output=True,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )
    return model.to(device)


def forward(model: Any, batch: MicroBatch, device: torch.device, *, packed: bool) -> Tensor:
    """Return what a stage makes of a micro-batch: losses of every place but the first, or hidden states."""
    ids, positions = batch.ids.to(device), batch.positions[:, :-1].to(device)
    sequences = None
    if packed:
        starts = (positions[0] == 0).nonzero()[:, 0]
        ends = torch.cat([starts, torch.tensor([positions.shape[1]], device=device)]).int()
        longest = int(ends.diff().max())
        sequences = PackedSeqParams("thd", ends, ends, max_seqlen_q=longest, max_seqlen_kv=longest)
    result: Tensor = model(
        ids[:, :-1].contiguous(), positions, None, labels=ids[:, 1:].contiguous(), packed_seq_params=sequences
    )
    return result


def logprobs(losses: Tensor, batch: MicroBatch) -> Tensor:
    """Return the log-probs of the trained tokens, [n], of the last stage's losses."""
    return -losses.float()[batch.mask[:, 1:].to(losses.device)]
