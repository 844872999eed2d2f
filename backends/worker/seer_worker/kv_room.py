"""Slots for running requests beside KV memory: how many suit it, and which is full first.

Both follow from settings and the checkpoint alone, before an engine has started.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from seer_core.plugins.hookspecs import Check

__all__ = ["fitting_slots", "slots", "token_bytes"]

LONGEST_IN_A_SLOT = 8
"""Slots are as many as KV holds contexts of the longest one divided by this.

The paper's workloads have mean responses of 0.19 to 0.40 of the longest (its evaluation), and a request that
runs has half of its response on average.
"""
LEAST_SLOTS, MOST_SLOTS = 64, 1024
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
    room = _room(model, kv_cache_bytes, dtype, max_model_tokens, tensor_parallel)
    if room is None:
        return []
    tokens, longest = room
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


def fitting_slots(
    model: Path, kv_cache_bytes: int | None, *, dtype: str, max_model_tokens: int, tensor_parallel: int = 1
) -> int:
    """Return how many slots suit an instance's KV, 64 to 1,024; 64 where its size is not known."""
    room = _room(model, kv_cache_bytes, dtype, max_model_tokens, tensor_parallel)
    if room is None:
        return LEAST_SLOTS
    tokens, longest = room
    return min(MOST_SLOTS, max(LEAST_SLOTS, LONGEST_IN_A_SLOT * tokens // longest))


def _room(
    model: Path, kv_cache_bytes: int | None, dtype: str, max_model_tokens: int, tensor_parallel: int
) -> tuple[int, int] | None:
    """Return the tokens whose KV an instance holds, and those of the longest context; None if unknown."""
    try:
        config = msgspec.json.decode((model / "config.json").read_bytes(), type=dict[str, Any])
        a_token = token_bytes(config, dtype, tensor_parallel)
        longest = max_model_tokens or int(config["max_position_embeddings"])
    except (OSError, ValueError, KeyError, TypeError, msgspec.DecodeError):
        return None
    if not a_token or kv_cache_bytes is None or longest < 1:
        return None
    return kv_cache_bytes // a_token, longest


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
