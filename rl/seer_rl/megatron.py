"""The trainer ``megatron``: Megatron-core's GPT model, in one process on a CPU.

What of Megatron-core 0.16 stands in the way there: it asks for the current CUDA device and for CUDA's random
states even where a model is initialised on the CPU, and its own core attention makes matrices of
[heads, length, length].  The first is answered with the CPU, the second replaced by torch's kernel, which is
also 20 times nearer to transformers' log-probs.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import Parameter
from torch.nn import functional as F
from transformers import AutoConfig

from seer_core.errors import ConfigError
from seer_rl.batches import MicroBatch
from seer_rl.config import TrainTable
from seer_rl.models import copy_all_but_weights
from seer_rl.torch_trainer import TorchTrainer

__all__ = ["MegatronModel", "megatron_trainer"]

WEIGHTS = "model.safetensors"
Weights = dict[str, Tensor]


def megatron_trainer(table: TrainTable, model: Path, seed: int) -> TorchTrainer:
    """Return the trainer ``megatron``.

    Raises:
        ConfigError: Megatron-core is not installed, or the model is none that it can be given here.
    """
    if table.torch.device != "cpu" or table.torch.packed:
        raise ConfigError(
            'the trainer "megatron" needs [train.torch] device = "cpu" and packed = false; use'
            ' trainer = "torch" elsewhere'
        )
    return TorchTrainer(table, model, seed, MegatronModel)


class MegatronModel:
    """A dense Qwen3 model as Megatron-core's ``GPTModel``."""

    def __init__(self, table: TrainTable, directory: Path) -> None:
        """Build the model of a directory, and read its weights."""
        self._first = directory
        self._config: Any = AutoConfig.from_pretrained(directory, local_files_only=True)
        kind = self._config.model_type
        if kind != "qwen3" or self._config.rope_parameters["rope_type"] != "default":
            raise ConfigError(
                'the trainer "megatron" knows dense Qwen3 models with plain rotary embeddings, and the one in'
                f' {directory}, a {kind}, is none; use trainer = "torch"'
            )
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # it warns of each accelerator that is not there
                self._model = _build(self._config)
        except ImportError as error:
            raise ConfigError(
                f"Megatron-core cannot be imported: {error}; pip install 'seer-rl[megatron]'"
            ) from error
        self.load(directory)

    @property
    def vocab_size(self) -> int:
        """Tokens that the model knows."""
        return int(self._config.vocab_size)

    def parameters(self) -> Iterable[Parameter]:
        """Return all parameters, tied ones once."""
        parameters: Iterable[Parameter] = self._model.parameters()
        return parameters

    def logprobs(self, batch: MicroBatch) -> Tensor:
        """Compute the log-prob of every token but the first of each row; those trained are looked at."""
        ids, labels = batch.ids[:, :-1].contiguous(), batch.ids[:, 1:].contiguous()
        losses: Tensor = self._model(ids, batch.positions[:, :-1], None, labels=labels)
        return -losses.float()[batch.mask[:, 1:]]

    def export(self, directory: Path) -> None:
        """Write the weights under Hugging Face's names, with all other files of the first model."""
        save_file(self.tensors(), directory / WEIGHTS, {"format": "pt"})
        copy_all_but_weights(self._first, directory)

    def tensors(self) -> Weights:
        """Return the weights under Hugging Face's names."""
        return _to_hugging_face(self._model.state_dict(), self._config)

    def load(self, directory: Path) -> None:
        """Take the weights in a directory."""
        try:
            weights = _to_megatron(load_file(directory / WEIGHTS), self._config)
        except (OSError, KeyError) as error:
            raise ConfigError(
                f"the trainer cannot read {directory / WEIGHTS}: {error}; it reads dense Qwen3"
                " models in one file"
            ) from error
        outcome = self._model.load_state_dict(weights, strict=False)
        missing = [name for name in outcome.missing_keys if not name.endswith("_extra_state")]
        if missing or outcome.unexpected_keys:
            raise ConfigError(f"{directory}: weights lack {missing} and have {outcome.unexpected_keys}")


class _CoreAttention(torch.nn.Module):
    """Causal attention by torch's kernel; made by Megatron-core, hence the arguments."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """Attend: [length, batch, heads, size] in, [length, batch, heads * size] out."""
        query, key, value = (each.permute(1, 2, 0, 3) for each in (query, key, value))
        siblings = query.shape[1] // key.shape[1]
        key, value = (each.repeat_interleave(siblings, dim=1) for each in (key, value))
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return out.permute(2, 0, 1, 3).flatten(2)


def _build(config: Any) -> Any:
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import TransformerConfig

    cuda: Any = torch.cuda
    if not torch.distributed.is_initialized():
        store = torch.distributed.HashStore()  # type: ignore[attr-defined]
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        cuda.current_device = partial(torch.device, "cpu")
        cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
        cuda.manual_seed = torch.manual_seed
        random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
        random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
        parallel_state.initialize_model_parallel()
        tensor_parallel.model_parallel_cuda_manual_seed(1)
    spec = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=True)
    spec.submodules.self_attention.submodules.core_attention = _CoreAttention
    return GPTModel(
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
    )


def _names(config: Any) -> dict[str, str]:
    """Return Hugging Face's names of the tensors that are the same in both, by Megatron-core's."""
    names = {
        "embedding.word_embeddings.weight": "model.embed_tokens.weight",
        "decoder.final_layernorm.weight": "model.norm.weight",
    }
    if not config.tie_word_embeddings:
        names["output_layer.weight"] = "lm_head.weight"
    for layer in range(config.num_hidden_layers):
        ours, theirs = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        names |= {
            f"{ours}self_attention.linear_proj.weight": f"{theirs}self_attn.o_proj.weight",
            f"{ours}self_attention.q_layernorm.weight": f"{theirs}self_attn.q_norm.weight",
            f"{ours}self_attention.k_layernorm.weight": f"{theirs}self_attn.k_norm.weight",
            f"{ours}mlp.linear_fc2.weight": f"{theirs}mlp.down_proj.weight",
            f"{ours}input_layernorm.weight": f"{theirs}input_layernorm.weight",
            f"{ours}pre_mlp_layernorm.weight": f"{theirs}post_attention_layernorm.weight",
        }
    return names


def _to_megatron(weights: Mapping[str, Tensor], config: Any) -> Weights:
    """Join what Megatron-core computes at once: q, k, v of each group of heads; gate and up."""
    groups, size = config.num_key_value_heads, config.head_dim
    out = {ours: weights[theirs] for ours, theirs in _names(config).items()}
    for layer in range(config.num_hidden_layers):
        ours, theirs = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        parts = [
            weights[f"{theirs}self_attn.{name}_proj.weight"].view(groups, -1, size, config.hidden_size)
            for name in ("q", "k", "v")
        ]
        out[f"{ours}self_attention.linear_qkv.weight"] = torch.cat(parts, 1).reshape(-1, config.hidden_size)
        both = [weights[f"{theirs}mlp.{name}_proj.weight"] for name in ("gate", "up")]
        out[f"{ours}mlp.linear_fc1.weight"] = torch.cat(both)
    return out


def _to_hugging_face(weights: Mapping[str, Tensor], config: Any) -> Weights:
    """Take apart what ``_to_megatron`` has joined."""
    groups, size = config.num_key_value_heads, config.head_dim
    queries = config.num_attention_heads // groups
    out = {theirs: weights[ours] for ours, theirs in _names(config).items()}
    for layer in range(config.num_hidden_layers):
        ours, theirs = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        joined = weights[f"{ours}self_attention.linear_qkv.weight"].view(groups, -1, size, config.hidden_size)
        for name, part in zip("qkv", torch.split(joined, [queries, 1, 1], 1), strict=True):
            out[f"{theirs}self_attn.{name}_proj.weight"] = part.reshape(-1, config.hidden_size)
        gate, up = weights[f"{ours}mlp.linear_fc1.weight"].chunk(2)
        out[f"{theirs}mlp.gate_proj.weight"], out[f"{theirs}mlp.up_proj.weight"] = gate, up
    return {name: tensor.detach().contiguous() for name, tensor in out.items()}
