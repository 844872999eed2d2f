"""Whether slots for running requests or KV memory are full first, from settings and the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from seer_core.plugins.hookspecs import Check

__all__ = ["slots", "token_bytes"]

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
OTHER_KV = ("kv_lora_rank", "ssm_cfg", "linear_num_key_heads", "text_config")
"""Fields of a ``config.json`` whose models keep something else than keys and values of each token."""


def slots(
    engine: str,
    model: Path,
    kv_cache_bytes: int | None,
    *,
    dtype: str,
    max_model_tokens: int,
    max_running: int,
    tensor_parallel: int = 1,
) -> list[Check]:
    """Return below which average context the slots of ``[engine.<engine>]`` are full before its KV.

    Nothing is returned where the checkpoint or the settings do not say how much KV there is.
    """
    try:
        config = msgspec.json.decode((model / "config.json").read_bytes(), type=dict[str, Any])
        a_token = token_bytes(config, dtype, tensor_parallel)
        longest = max_model_tokens or int(config["max_position_embeddings"])
    except (OSError, ValueError, KeyError, TypeError, msgspec.DecodeError):
        return []
    if not a_token or kv_cache_bytes is None:
        return []
    tokens = kv_cache_bytes // a_token
    at_least = tokens // longest
    remedy = f"raise [engine.{engine}].max_running to {at_least:,}: even the longest contexts leave KV unused"
    return [
        Check(
            engine,
            True,
            f"KV of {tokens:,} tokens and {max_running:,} slots (max_running): the slots are full first where"
            f" contexts average less than {tokens // max_running:,} tokens",
            remedy if at_least > max_running else "",
        )
    ]


def token_bytes(config: Mapping[str, Any], dtype: str, tensor_parallel: int = 1) -> int:
    """Return the bytes of one token's keys and values on one device; 0 where a model keeps something else.

    ``dtype`` is the setting: "auto" stands for the checkpoint's.

    Raises:
        KeyError, TypeError: the config lacks a field, or has it in another form.
    """
    kinds = set(config.get("layer_types") or ["full_attention"])
    slides = config.get("sliding_window") and config.get("use_sliding_window", True)
    if kinds != {"full_attention"} or slides or any(config.get(name) for name in OTHER_KV):
        return 0
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    width = config.get("head_dim") or config["hidden_size"] // heads
    kind = (config.get("dtype") or config["torch_dtype"]) if dtype == "auto" else dtype
    number = DTYPE_BYTES.get(kind, 0)
    return int(2 * config["num_hidden_layers"] * max(1, kv_heads // tensor_parallel) * width * number)
