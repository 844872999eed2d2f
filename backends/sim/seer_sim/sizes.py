"""Sizes of a model, from its config.json: the weights, KV and work of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from seer_core.errors import ConfigError, quote

__all__ = ["ModelSizes", "read_sizes", "sizes_of"]

Precision = Literal["bf16", "fp8"]

BF16_BYTES = 2.0

VALUE_BYTES = {"fp8": 1.0, "fbgemm_fp8": 1.0, "mxfp4": 17 / 32, "nvfp4": 9 / 16, "awq": 0.53, "gptq": 0.53}
"""Bytes of a weight by ``quant_method``, the scales of its blocks included (OCP MX; NVFP4: 16 values; AWQ and
GPTQ: groups of 128)."""

EXPERTS_ONLY = ("mxfp4",)
"""Methods that leave what is no routed expert in bf16 (gpt-oss)."""

LEFT_OUT: Mapping[str, Mapping[str, Any]] = {
    "gemma3_text": {
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window_pattern": 6,
    }
}
"""By ``model_type``: what transformers takes where a published config.json leaves it out."""

UNLIKE = {
    "hybrid_override_pattern": "Mamba layers",
    "hybrid_layer_pattern": "a pattern of layers of its own",
    "mamba_d_ssm": "Mamba heads beside attention",
    "ssm_cfg": "Mamba layers",
    "block_configs": "layers of unlike sizes",
}
"""Keys of families whose layers are not described here, and what these have."""


class ModelSizes(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A model; values are numbers of weights, bytes are those in memory, FLOPs are for one position.

    The routed experts of a mixture are counted apart.  Vision towers and the embedding's table, of which a
    step reads a few rows, are left out.
    """

    layers: int
    """Layers of the text model."""
    hidden: int
    """The width of the residual stream, which tensor parallelism reduces twice per layer."""
    vocabulary: int
    """The logits of one position."""
    weights: float
    """Weights that each position uses, with the shared experts and the output's matrix."""
    weight_bytes: float
    """Their bytes."""
    experts: int = 0
    """Routed experts per layer; 0 where the model is dense."""
    chosen: int = 0
    """Routed experts per position."""
    expert_weights: float = 0.0
    """Weights of all routed experts of all layers."""
    expert_bytes: float = 0.0
    """Their bytes."""
    kv_heads: int
    """Heads among which GPUs can divide the KV; 1 where it is latent."""
    kv_bytes_per_token: float
    """The KV of one token in layers that see the whole context, in bf16."""
    attention_flops: float
    """FLOPs of attention for each position and token of its context, in these layers."""
    prefill_attention_flops: float
    """The same while a context is computed; latent attention then works on unfolded keys and values."""
    precision: Precision = "bf16"
    """What the layers' matrices compute in."""

    @property
    def expert_share(self) -> float:
        """Experts per position over experts; 1 where the model is dense."""
        return self.chosen / self.experts if self.experts else 1.0


def read_sizes(path: Path) -> ModelSizes:
    """Read the sizes of a model from its directory, or from its config.json.

    Raises:
        ConfigError: there is no such file, or the family is not described.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        config = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{file} is no config.json of a model: {error}") from error
    return sizes_of(config)


def sizes_of(config: Mapping[str, Any]) -> ModelSizes:
    """Return the sizes of a model by the keys that transformers gives its config.json.

    Dense models, mixtures with shared experts, latent attention (DeepSeek-V2, arXiv 2405.04434), sliding
    windows and gated delta nets (Qwen3-Next), whose layers keep no KV.  The KV of a window is left out, and
    so is the state of a delta net, as neither grows.

    Raises:
        ConfigError: a size is missing, or the family has layers that are not described.
    """
    text = {**config, **config.get("text_config", {})}
    text = {**LEFT_OUT.get(text.get("model_type", ""), {}), **text}
    for key, kind in UNLIKE.items():
        if text.get(key):
            raise ConfigError(f"config.json has {key}: {kind} are not modelled; fit rows without --model")
    layers, hidden = _int(text, "num_hidden_layers"), _int(text, "hidden_size")
    vocabulary = _int(text, "vocab_size")
    full = _full_layers(text, layers)
    attention, kv_heads, kv_values, flops, prefill_flops = _attention(text, hidden)
    experts = _first(text, ("n_routed_experts", "num_local_experts", "num_experts"), 0)
    mixtures = _mixture_layers(text, layers) if experts else 0
    inner = _first(text, ("intermediate_size", "ffn_dim"), 0)
    expert_inner = _first(text, ("moe_intermediate_size",), inner)
    shared_inner = _first(text, ("shared_expert_intermediate_size",), 0)
    shared_inner = shared_inner or _first(text, ("n_shared_experts",), 0) * expert_inner
    matrices = 3 * hidden
    head = vocabulary * hidden
    linear = _delta_net(text, hidden) if "linear_num_value_heads" in text else attention
    body = full * attention + (layers - full) * linear + (layers - mixtures) * matrices * inner
    body += mixtures * (matrices * shared_inner + hidden * experts)
    expert_weights = mixtures * experts * matrices * expert_inner
    body_bytes, expert_value_bytes, precision = _precisions(config, text)
    return ModelSizes(
        layers=layers,
        hidden=hidden,
        vocabulary=vocabulary,
        weights=float(body + head),
        weight_bytes=body * body_bytes + head * BF16_BYTES,
        experts=experts,
        chosen=_first(text, ("num_experts_per_tok", "experts_per_token", "top_k_experts"), 0),
        expert_weights=float(expert_weights),
        expert_bytes=expert_weights * expert_value_bytes,
        kv_heads=kv_heads,
        kv_bytes_per_token=full * kv_values * BF16_BYTES,
        attention_flops=full * flops,
        prefill_attention_flops=full * prefill_flops,
        precision=precision,
    )


def _attention(text: Mapping[str, Any], hidden: int) -> tuple[float, int, float, float, float]:
    """Return a layer's weights, heads of KV, values of KV per token, and FLOPs per position and token."""
    heads = _int(text, "num_attention_heads")
    if latent := text.get("kv_lora_rank"):
        rotary, plain = _int(text, "qk_rope_head_dim"), _int(text, "qk_nope_head_dim")
        value, query = _int(text, "v_head_dim"), text.get("q_lora_rank")
        weights = hidden * (latent + rotary) + latent * heads * (plain + value) + heads * value * hidden
        key = heads * (plain + rotary)
        weights += hidden * query + query * key if query else hidden * key
        flops = heads * 2.0 * (2 * latent + rotary)
        return weights, 1, latent + rotary, flops, heads * 2.0 * (plain + rotary + value)
    kv_heads = text.get("num_key_value_heads") or heads
    size = text.get("head_dim") or hidden // heads
    gates = heads if "linear_num_value_heads" in text else 0  # Qwen3-Next's outputs pass one per value
    weights = hidden * (2 * heads + gates + 2 * kv_heads) * size
    flops = heads * 2.0 * 2 * size
    return weights, kv_heads, 2 * kv_heads * size, flops, flops


def _delta_net(text: Mapping[str, Any], hidden: int) -> float:
    """Return the weights of a layer whose attention is a gated delta net."""
    heads = _int(text, "linear_num_value_heads")
    keys = _int(text, "linear_num_key_heads") * _int(text, "linear_key_head_dim")
    values = heads * _int(text, "linear_value_head_dim")
    convolved = (2 * keys + values) * _first(text, ("linear_conv_kernel_dim",), 4)
    return hidden * (2 * keys + 3 * values + 2 * heads) + convolved


def _full_layers(text: Mapping[str, Any], layers: int) -> int:
    """Return the layers whose attention sees the whole context."""
    kinds: Sequence[str] | None = text.get("layer_types")
    if kinds:
        return sum(kind in ("full_attention", "attention") for kind in kinds)
    if every := text.get("full_attention_interval"):
        return layers // int(every)
    if text.get("sliding_window") and (every := text.get("sliding_window_pattern")):
        return layers // int(every)
    return layers


def _mixture_layers(text: Mapping[str, Any], layers: int) -> int:
    """Return the layers that have routed experts."""
    dense = set(text.get("mlp_only_layers") or ())
    first = _first(text, ("first_k_dense_replace",), 0)
    every = _first(text, ("decoder_sparse_step", "moe_layer_freq", "interleave_moe_layer_step"), 1)
    return sum(each >= first and each not in dense and (each + 1) % every == 0 for each in range(layers))


def _precisions(config: Mapping[str, Any], text: Mapping[str, Any]) -> tuple[float, float, Precision]:
    """Return the bytes of a weight, of a routed expert's, and what matrices compute in."""
    table = config.get("quantization_config") or text.get("quantization_config") or {}
    method = table.get("quant_method", "")
    if not method:
        return BF16_BYTES, BF16_BYTES, "bf16"
    if method == "compressed-tensors":
        groups = [group.get("weights") or {} for group in (table.get("config_groups") or {}).values()]
        bits = min((group.get("num_bits", 16) for group in groups), default=16)
        size = bits / 8 + (1 / 16 if bits < 8 else 0.0)
        ignored = " ".join(table.get("ignore") or ())
        body = BF16_BYTES if "self_attn" in ignored else size
        return body, size, "fp8" if bits == 8 else "bf16"
    if method == "modelopt":
        method = str(table.get("quant_algo", "")).lower()
    if method not in VALUE_BYTES:
        raise ConfigError(
            f"config.json has quant_method {quote(method)}, of which no size is written down here; there are"
            f" {', '.join(VALUE_BYTES)}"
        )
    size = VALUE_BYTES[method]
    return BF16_BYTES if method in EXPERTS_ONLY else size, size, "fp8" if size == 1.0 else "bf16"


def _int(text: Mapping[str, Any], key: str) -> int:
    value = text.get(key)
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"config.json gives {key} = {value!r}; the model's sizes need it")
    return value


def _first(text: Mapping[str, Any], keys: Sequence[str], otherwise: int) -> int:
    """Return the first of some keys that is there; some families write one number for each layer."""
    for key in keys:
        value = text.get(key)
        if isinstance(value, list):
            value = max(value, default=0)
        if isinstance(value, int):
            return value
    return otherwise
