"""The KV of a model by kind of layer, from its config.json.

Layers of attention keep values of every token, or of those within a window; recurrent ones keep a state of
each request, however long it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import attrs

from seer_core.errors import ConfigError, quote

__all__ = [
    "Layer",
    "LayerKv",
    "LayerState",
    "ModelKv",
    "delta_sizes",
    "head_sizes",
    "kv_of",
    "layers_of",
    "mamba_sizes",
    "mixers_of",
    "size_of",
    "text_of",
]

LEFT_OUT: Mapping[str, Mapping[str, Any]] = {
    "gemma2": {"sliding_window_pattern": 2},
    "gemma3_text": {
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window_pattern": 6,
    },
}
"""By ``model_type``: what transformers takes where a published config.json leaves it out."""

UNLIKE = {
    "hybrid_layer_pattern": "a pattern of layers of its own",
    "ssm_cfg": "layers of the first Mamba",
    "block_configs": "layers of unlike sizes",
    "attn_layer_period": "layers of the first Mamba",
    "use_cla": "layers that share KV",
}
"""Keys of families whose layers are not described here, and what these have."""

Mixer = Literal["full", "window", "delta net", "mamba", ""]
"""What goes from token to token in a layer; "" is nothing."""

MIXERS: Mapping[str, Mixer] = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "window",
    "chunked_attention": "window",
    "mamba": "mamba",
    "mlp": "",
    "moe": "",
}
"""By the names that transformers gives to kinds of layers."""
PATTERN = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
"""Letters of Nemotron-H's ``hybrid_override_pattern``."""
KEY_HEADS = ("n_head_kv", "num_kv_heads", "num_key_value_heads", "num_attention_groups")
"""Names of the heads of keys, of which a model has one; without any it has as many as of queries."""
STATE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@attrs.frozen
class Layer:
    """A layer: what goes from token to token, and beside it, in parallel, a Mamba of Falcon-H1's kind.

    ``kind`` is what its family calls it, for those whose layers have one part each.
    """

    mixer: Mixer
    kind: str = ""
    mamba: bool = False


@attrs.frozen
class LayerKv:
    """The KV of a layer: ``values`` of each head and token, for the last ``window`` tokens, or for all."""

    heads: int
    values: int
    window: int | None = None

    def of(self, tokens: float, ranks: int) -> float:
        """Return the values of so many tokens on one of the ranks, which divide the heads."""
        held = tokens if self.window is None else min(tokens, self.window)
        return held * max(1, self.heads // ranks) * self.values


@attrs.frozen
class LayerState:
    """The state of a recurrent layer: the last inputs of its convolution, and what it has become."""

    convolved: int
    recurrent: int
    recurrent_bytes: int
    """Of each value of the latter."""


@attrs.frozen
class ModelKv:
    """The KV of a model."""

    layers: tuple[LayerKv, ...]
    states: tuple[LayerState, ...] = ()

    def token_values(self, ranks: int = 1) -> int:
        """Return the values that each further token of a long context takes on one of the ranks."""
        return int(sum(layer.of(1, ranks) for layer in self.layers if layer.window is None))

    def request_values(self, tokens: float, ranks: int = 1) -> float:
        """Return the values that a request of so many tokens takes there, its states left out."""
        return sum(layer.of(tokens, ranks) for layer in self.layers)

    def state_bytes(self, value_bytes: float, ranks: int = 1) -> float:
        """Return the bytes of a request's states there."""
        states = (
            each.convolved * value_bytes + each.recurrent * each.recurrent_bytes for each in self.states
        )
        return sum(states) / ranks


def text_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of the part of a model that writes text, with those that its file leaves out.

    Raises:
        ConfigError: it is of a family whose layers are not described.
    """
    inner = {key: value for key, value in (config.get("text_config") or {}).items() if value is not None}
    text = {**config, **inner}
    text = {**LEFT_OUT.get(text.get("model_type", ""), {}), **text}
    for key, kind in UNLIKE.items():
        if text.get(key):
            raise ConfigError(f"config.json has {key}: {kind} are not described here")
    return text


def layers_of(text: Mapping[str, Any]) -> list[Layer]:
    """Return the layers of a model, by its settings of text.

    Raises:
        ConfigError: a size is missing, or some are of a kind that is not described.
    """
    named: Sequence[str] | None = text.get("layers_block_type") or text.get("layer_types")
    if pattern := text.get("hybrid_override_pattern"):
        named = [PATTERN.get(letter, letter) for letter in pattern]
    if named:
        return [_layer(kind, text) for kind in named]
    if 0 in (text.get("attn_type_list") or ()):  # MiniMax-Text-01
        raise ConfigError("config.json has attn_type_list with 0: layers of its kind are not described here")
    count = size_of(text, "num_hidden_layers")
    if attending := text.get("attn_layer_indices"):  # Bamba
        return [_layer("attention" if each in attending else "mamba", text) for each in range(count)]
    if text.get("attention_chunk_size"):  # Llama-4
        interval = text.get("no_rope_layer_interval") or 4
        chunked = text.get("no_rope_layers") or [(each + 1) % interval for each in range(count)]
        return [_layer("chunked_attention" if each else "attention", text) for each in chunked]
    if every := text.get("full_attention_interval"):
        return [
            _layer("linear_attention" if (each + 1) % every else "attention", text) for each in range(count)
        ]
    mamba = bool(text.get("mamba_d_ssm"))
    slides = text.get("sliding_window") and text.get("use_sliding_window", True)
    every = text.get("sliding_window_pattern") or text.get("_sliding_window_pattern")
    first = text.get("max_window_layers") or 0 if "use_sliding_window" in text else 0
    return [
        Layer(
            "window" if slides and each >= first and (not every or (each + 1) % every) else "full", "", mamba
        )
        for each in range(count)
    ]


def mixers_of(config: Mapping[str, Any]) -> set[str]:
    """Return what goes from token to token in some layer of a model; of layers not described, nothing."""
    try:
        text = text_of(config)
        layers = layers_of(text)
    except (ConfigError, TypeError, ValueError, AttributeError):
        return set()
    found: set[str] = {layer.mixer for layer in layers if layer.mixer}
    found |= {"mamba"} if any(layer.mamba for layer in layers) else set()
    return found | ({"latent"} if text.get("kv_lora_rank") else set())


def _layer(kind: str, text: Mapping[str, Any]) -> Layer:
    mixer = MIXERS.get(kind)
    if kind == "linear_attention":
        mixer = (
            "mamba"
            if "mamba_num_heads" in text or "mamba_n_heads" in text
            else "delta net"
            if "linear_num_value_heads" in text
            else None
        )
    if mixer is None:
        raise ConfigError(f"config.json has layers of the kind {quote(kind)}, which are not described here")
    return Layer(mixer, kind)


def kv_of(config: Mapping[str, Any]) -> ModelKv:
    """Return the KV of a model by its config.json.

    Attention, also with sliding windows, with heads that differ between layers (Gemma-4) and latent
    (DeepSeek-V2, arXiv 2405.04434); gated delta nets (Qwen3-Next) and Mamba-2.

    Raises:
        ConfigError: a size is missing, or some layers are of a kind that is not described.
    """
    text = text_of(config)
    layers = layers_of(text)
    owning = len(layers) - (text.get("num_kv_shared_layers") or 0)  # the last ones read what others keep
    kept = [
        _kept(text, number, layer)
        for number, layer in enumerate(layers[:owning])
        if layer.mixer in ("full", "window")
    ]
    states = [_delta_state(text) for layer in layers if layer.mixer == "delta net"]
    states += [_mamba_state(text) for layer in layers if layer.mixer == "mamba" or layer.mamba]
    return ModelKv(tuple(kept), tuple(states))


def _kept(text: Mapping[str, Any], number: int, layer: Layer) -> LayerKv:
    """Return the KV of a layer of attention."""
    if latent := text.get("kv_lora_rank"):
        return LayerKv(1, latent + size_of(text, "qk_rope_head_dim") + _index_values(text, number))
    heads, width = head_sizes(text, number, layer)
    chunked = layer.kind == "chunked_attention"
    window = text.get("attention_chunk_size" if chunked else "sliding_window")
    return LayerKv(heads, 2 * width, window if layer.mixer == "window" else None)


def _index_values(text: Mapping[str, Any], number: int) -> int:
    """Return the values of two bytes by which a layer of DeepSeek-V3.2's kind finds the tokens to attend to.

    It keeps a byte for each of the key's values, and four for each 128 of them (vLLM's ``Indexer``).  Layers
    that use the indices of the one before keep none (IndexCache, arXiv 2603.12201).
    """
    if not text.get("index_topk"):
        return 0
    if pattern := text.get("index_topk_pattern"):
        shares = pattern[number : number + 1] == "S"
    else:
        offset = text.get("index_skip_topk_offset", 2)
        shares = max(number - offset + 1, 0) % (text.get("index_topk_freq") or 1) != 0
    width = size_of(text, "index_head_dim")
    return 0 if shares else (width + width // 128 * 4) // 2


def head_sizes(text: Mapping[str, Any], number: int, layer: Layer) -> tuple[int, int]:
    """Return the heads of a layer's keys, and the width of each head."""
    heads = next((text[name] for name in KEY_HEADS if text.get(name)), 0)
    if text.get("multi_query") and not text.get("new_decoder_architecture"):  # Falcon-7B
        heads = 1
    heads = heads or size_of(text, "num_attention_heads")
    width = text.get("head_dim") or size_of(text, "hidden_size") // size_of(text, "num_attention_heads")
    own: Mapping[str, Any] = (text.get("per_layer_config") or {}).get(str(number), {})
    if layer.mixer == "full" and "per_layer_config" not in text:  # Gemma-4, as it was published
        width = text.get("global_head_dim") or width
        if text.get("attention_k_eq_v"):
            heads = text.get("num_global_key_value_heads") or heads
    return own.get("num_key_value_heads", heads), own.get("head_dim", width)


def delta_sizes(text: Mapping[str, Any]) -> tuple[int, int, int, int]:
    """Return of a gated delta net: the width of all keys, of all values, heads, inputs of a convolution."""
    heads = size_of(text, "linear_num_value_heads")
    keys = size_of(text, "linear_num_key_heads") * size_of(text, "linear_key_head_dim")
    values = heads * size_of(text, "linear_value_head_dim")
    return keys, values, heads, text.get("linear_conv_kernel_dim") or 4


def mamba_sizes(text: Mapping[str, Any]) -> tuple[int, int, int, int, int]:
    """Return of Mamba-2: its width, heads, all groups' width, a head's state, and inputs of a convolution."""
    if "mamba_d_state" in text:  # Falcon-H1's names
        names = ("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv")
    else:
        names = ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel")
    heads, width, groups, state, inputs = (size_of(text, name) for name in names)
    return heads * width, heads, groups * state, state, inputs


def _delta_state(text: Mapping[str, Any]) -> LayerState:
    keys, values, _, inputs = delta_sizes(text)
    recurrent = values * size_of(text, "linear_key_head_dim")
    return LayerState((2 * keys + values) * (inputs - 1), recurrent, _state_value_bytes(text))


def _mamba_state(text: Mapping[str, Any]) -> LayerState:
    width, _, groups, state, inputs = mamba_sizes(text)
    return LayerState((width + 2 * groups) * (inputs - 1), width * state, _state_value_bytes(text))


def _state_value_bytes(text: Mapping[str, Any]) -> int:
    """Return the bytes of a value of a state: as the config has it, or float32's, which is the most."""
    kind = text.get("mamba_ssm_dtype") or text.get("mamba_ssm_cache_dtype")
    return STATE_BYTES.get(str(kind), STATE_BYTES["float32"])


def size_of(text: Mapping[str, Any], key: str) -> int:
    """Return a size.

    Raises:
        ConfigError: there is none.
    """
    value = text.get(key)
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"config.json gives {key} = {value!r}; the model's sizes need it")
    return value
