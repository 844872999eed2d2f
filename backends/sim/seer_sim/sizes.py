"""Sizes of a model, from its config.json: the weights, KV and work of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
from seer_host.model_kv import (
    Layer,
    LayerKv,
    delta_sizes,
    head_sizes,
    kv_of,
    layers_of,
    mamba_sizes,
    size_of,
    text_of,
)

from seer_core.errors import ConfigError, quote

__all__ = ["ModelSizes", "read_sizes", "sizes_of"]

Precision = Literal["bf16", "fp8"]

BF16_BYTES = 2.0

VALUE_BYTES = {"fp8": 1.0, "fbgemm_fp8": 1.0, "mxfp4": 17 / 32, "nvfp4": 9 / 16, "awq": 0.53, "gptq": 0.53}
"""Bytes of a weight by ``quant_method``, the scales of its blocks included (OCP MX; NVFP4: 16 values; AWQ and
GPTQ: groups of 128)."""

EXPERTS_ONLY = ("mxfp4",)
"""Methods that leave what is no routed expert in bf16 (gpt-oss)."""


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
    """The KV of one token in layers that see the whole context, in bf16; in all layers if none does."""
    window_bytes: float = 0.0
    """The KV of one request in full windows, where other layers see the whole context."""
    state_bytes: float = 0.0
    """The states of one request in recurrent layers."""
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
    windows, gated delta nets (Qwen3-Next), Mamba-2 in layers of its own (Nemotron-H, Bamba, Granite-4) or
    beside attention (Falcon-H1), chunks of attention (Llama-4), and heads that differ between layers
    (Gemma-4).

    Raises:
        ConfigError: a size is missing, or the family has layers that are not described.
    """
    text = text_of(config)
    layers, hidden, vocabulary = layers_of(text), size_of(text, "hidden_size"), size_of(text, "vocab_size")
    kept = kv_of(config)
    whole = [each for each in kept.layers if each.window is None] or [*kept.layers]
    if not whole:
        raise ConfigError("config.json has no layer of attention; costs of such models are not modelled")
    windows = [each for each in kept.layers if each not in whole]
    seeing = [number for number, each in enumerate(layers) if each.mixer == "full"]
    seeing = seeing or [number for number, each in enumerate(layers) if each.mixer == "window"]
    flops = [_attention_flops(text, number, layers[number]) for number in seeing]
    experts = _first(text, ("n_routed_experts", "num_local_experts", "num_experts"), 0)
    inner = _first(text, ("intermediate_size", "ffn_dim"), 0)
    expert_inner = _first(text, ("moe_intermediate_size",), inner)
    dense = _first(text, ("intermediate_size_mlp",), inner)  # Llama-4's
    dense = dense if experts else _first(text, ("shared_intermediate_size",), dense)  # Granite-4's
    matrices = 2 if text.get("mlp_hidden_act") == "relu2" else 3
    latent = text.get("moe_latent_size") or hidden
    apart = any(not layer.mixer for layer in layers)  # Nemotron-H's layers have one part each
    sparse = _mixtures(text, layers, apart=apart) if experts else set()
    owning = len(layers) - _first(text, ("num_kv_shared_layers",), 0)
    body = 0.0
    for number, layer in enumerate(layers):
        body += _mixer_weights(text, number, layer, keeps=number < owning)
        body += 2 * hidden * _first(text, ("hidden_size_per_layer_input",), 0)
        if number in sparse:
            body += matrices * hidden * _shared_inner(text, expert_inner) + hidden * experts
            body += 2 * hidden * latent if latent != hidden else 0
            body += hidden if text.get("shared_expert_intermediate_size") else 0  # whose output a gate weighs
        if text.get("enable_moe_block") or (layer.kind == "mlp" if apart else number not in sparse):
            wide = 2 if text.get("use_double_wide_mlp") and number >= owning else 1
            body += matrices * hidden * dense * wide
    head = vocabulary * hidden
    expert_weights = len(sparse) * experts * matrices * latent * expert_inner
    body_bytes, expert_value_bytes, precision = _precisions(config, text)
    return ModelSizes(
        layers=len(layers),
        hidden=hidden,
        vocabulary=vocabulary,
        weights=float(body + head),
        weight_bytes=body * body_bytes + head * BF16_BYTES,
        experts=experts,
        chosen=_first(text, ("num_experts_per_tok", "experts_per_token", "top_k_experts"), 0),
        expert_weights=float(expert_weights),
        expert_bytes=expert_weights * expert_value_bytes,
        kv_heads=min(each.heads for each in whole),
        kv_bytes_per_token=sum(each.heads * each.values for each in whole) * BF16_BYTES,
        window_bytes=sum(map(_window_values, windows)) * BF16_BYTES,
        state_bytes=kept.state_bytes(BF16_BYTES),
        attention_flops=float(sum(decoding for decoding, _ in flops)),
        prefill_attention_flops=float(sum(prefilling for _, prefilling in flops)),
        precision=precision,
    )


def _window_values(layer: LayerKv) -> float:
    return layer.of(layer.window or 0, 1)


def _mixer_weights(text: Mapping[str, Any], number: int, layer: Layer, *, keeps: bool) -> float:
    """Return the weights of a layer by which tokens see others; one that ``keeps`` no KV reads another's."""
    hidden = size_of(text, "hidden_size")
    mamba = _mamba(text, hidden) if layer.mixer == "mamba" or layer.mamba else 0.0
    if layer.mixer == "delta net":
        return _delta_net(text, hidden)
    if layer.mixer not in ("full", "window"):
        return mamba
    heads = size_of(text, "num_attention_heads")
    if latent := text.get("kv_lora_rank"):
        rotary, plain, value = _latent_sizes(text)
        weights = hidden * (latent + rotary) + latent * heads * (plain + value) + heads * value * hidden
        key, query = heads * (plain + rotary), text.get("q_lora_rank")
        return float(weights + (hidden * query + query * key if query else hidden * key))
    kv_heads, width = head_sizes(text, number, layer)
    gates = heads if "linear_num_value_heads" in text else 0  # Qwen3-Next's outputs pass one per value
    one = text.get("attention_k_eq_v") and layer.mixer == "full"
    kept = (1 if one else 2) * kv_heads if keeps else 0
    return float(hidden * (2 * heads + gates + kept) * width) + mamba


def _attention_flops(text: Mapping[str, Any], number: int, layer: Layer) -> tuple[float, float]:
    """Return the FLOPs of a layer's attention per position and token, and the same in prefills."""
    heads = size_of(text, "num_attention_heads")
    if latent := text.get("kv_lora_rank"):
        rotary, plain, value = _latent_sizes(text)
        return heads * 2.0 * (2 * latent + rotary), heads * 2.0 * (plain + rotary + value)
    flops = heads * 2.0 * 2 * head_sizes(text, number, layer)[1]
    return flops, flops


def _latent_sizes(text: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return the widths of a head's rotary key, of its other key, and of its value."""
    return size_of(text, "qk_rope_head_dim"), size_of(text, "qk_nope_head_dim"), size_of(text, "v_head_dim")


def _delta_net(text: Mapping[str, Any], hidden: int) -> float:
    """Return the weights of a layer whose attention is a gated delta net."""
    keys, values, heads, inputs = delta_sizes(text)
    return float(hidden * (2 * keys + 3 * values + 2 * heads) + (2 * keys + values) * inputs)


def _mamba(text: Mapping[str, Any], hidden: int) -> float:
    """Return the weights of Mamba-2."""
    width, heads, groups, _, inputs = mamba_sizes(text)
    convolved = width + 2 * groups
    return float(hidden * (width + convolved + heads) + convolved * inputs + width * hidden)


def _shared_inner(text: Mapping[str, Any], expert_inner: int) -> int:
    """Return the width of the experts that every position uses."""
    if "intermediate_size_mlp" in text:  # Llama-4, which has one
        return expert_inner
    each = _first(text, ("moe_shared_expert_intermediate_size",), expert_inner)
    alone = _first(text, ("shared_expert_intermediate_size", "shared_intermediate_size"), 0)
    return alone or _first(text, ("n_shared_experts",), 0) * each


def _mixtures(text: Mapping[str, Any], layers: Sequence[Layer], *, apart: bool) -> set[int]:
    """Return the numbers of the layers that have routed experts."""
    if apart:
        return {number for number, layer in enumerate(layers) if layer.kind == "moe"}
    dense = set(text.get("mlp_only_layers") or ())
    first = _first(text, ("first_k_dense_replace",), 0)
    every = _first(text, ("decoder_sparse_step", "moe_layer_freq", "interleave_moe_layer_step"), 1)
    return {
        each for each in range(len(layers)) if each >= first and each not in dense and (each + 1) % every == 0
    }


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


def _first(text: Mapping[str, Any], keys: Sequence[str], otherwise: int) -> int:
    """Return the first of some keys that is there; some families write one number for each layer."""
    for key in keys:
        value = text.get(key)
        if isinstance(value, list):
            value = max(value, default=0)
        if isinstance(value, int):
            return value
    return otherwise
