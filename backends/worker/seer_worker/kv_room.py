"""Slots for running requests beside KV memory: how many suit it, and which is full first.

Both follow from settings and the checkpoint alone, before an engine has started.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import msgspec
from seer_host.model_kv import ModelKv, kv_of, text_of

from seer_core.errors import ConfigError
from seer_core.plugins.hookspecs import Check

__all__ = ["fitting_slots", "slots", "token_bytes"]

LONGEST_IN_A_SLOT = 8
"""Slots are as many as KV holds contexts of the longest one divided by this.

The paper's workloads have mean responses of 0.19 to 0.40 of the longest (its evaluation), and a request that
runs has half of its response on average.
"""
LEAST_SLOTS, MOST_SLOTS = 64, 1024
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
STATES = 2
"""States of a request that an engine holds where it goes from one block to the next."""


@attrs.frozen
class KvRoom:
    """The KV memory of an instance on one of its ranks, and what requests take of it.

    With ``every_layer`` an engine keeps all tokens in each layer, as if it saw the whole context.
    """

    kv_bytes: int
    longest: int
    """The tokens of the longest context."""
    kv: ModelKv
    value_bytes: int
    ranks: int
    every_layer: bool

    def requests(self, tokens: float) -> int:
        """Return how many requests of so many tokens fit."""
        return int(self.kv_bytes / self._taken(tokens))

    def tokens(self, requests: int) -> int:
        """Return how many tokens each of so many requests can have."""
        least, most = 0, max(self.longest, self.kv_bytes // requests)
        while least < most:
            middle = (least + most + 1) // 2
            if requests * self._taken(middle) <= self.kv_bytes:
                least = middle
            else:
                most = middle - 1
        return least

    def _taken(self, tokens: float) -> float:
        """Return the bytes that a request of so many tokens takes."""
        if self.every_layer:
            return tokens * self.value_bytes * sum(layer.of(1, self.ranks) for layer in self.kv.layers)
        values = self.kv.request_values(tokens, self.ranks)
        return values * self.value_bytes + STATES * self.kv.state_bytes(self.value_bytes, self.ranks)


def slots(
    engine: str,
    model: Path,
    kv_cache_bytes: int | None,
    *,
    dtype: str,
    max_model_tokens: int,
    max_running: int,
    tensor_parallel: int = 1,
    every_layer: bool = False,
) -> list[Check]:
    """Return below which average context the slots of ``[engine.<engine>]`` are full before its KV.

    Nothing is returned where the checkpoint or the settings do not say how much KV there is.
    """
    room = _room(model, kv_cache_bytes, dtype, max_model_tokens, tensor_parallel, every_layer)
    if room is None:
        return []
    average, at_least = room.tokens(max_running), room.requests(room.longest)
    remedy = f"raise [engine.{engine}].max_running to {at_least:,}: even the longest contexts leave KV unused"
    return [
        Check(
            engine,
            True,
            f"KV of {average * max_running:,} tokens and {max_running:,} slots (max_running): the slots are"
            f" full first where contexts average less than {average:,} tokens",
            remedy if at_least > max_running else "",
        )
    ]


def fitting_slots(
    model: Path,
    kv_cache_bytes: int | None,
    *,
    dtype: str,
    max_model_tokens: int,
    tensor_parallel: int = 1,
    every_layer: bool = False,
) -> int:
    """Return how many slots suit an instance's KV, 64 to 1,024; 64 where its size is not known."""
    room = _room(model, kv_cache_bytes, dtype, max_model_tokens, tensor_parallel, every_layer)
    if room is None:
        return LEAST_SLOTS
    return min(MOST_SLOTS, max(LEAST_SLOTS, room.requests(room.longest / LONGEST_IN_A_SLOT)))


def _room(
    model: Path,
    kv_cache_bytes: int | None,
    dtype: str,
    max_model_tokens: int,
    tensor_parallel: int,
    every_layer: bool,
) -> KvRoom | None:
    """Return the KV memory of an instance; None if the checkpoint or the settings do not say it."""
    try:
        config = msgspec.json.decode((model / "config.json").read_bytes(), type=dict[str, Any])
        kv, value_bytes = kv_of(config), _value_bytes(config, dtype)
        longest = max_model_tokens or int(text_of(config)["max_position_embeddings"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ConfigError, msgspec.DecodeError):
        return None
    if not (value_bytes and kv.layers) or kv_cache_bytes is None or longest < 1:
        return None
    return KvRoom(kv_cache_bytes, longest, kv, value_bytes, tensor_parallel, every_layer)


def token_bytes(config: Mapping[str, Any], dtype: str, tensor_parallel: int = 1) -> int:
    """Return the bytes that each further token of a long context takes on one device; 0 if unknown.

    ``dtype`` is the setting: "auto" stands for the checkpoint's.

    Raises:
        ConfigError: the config lacks a size, or has layers that are not described.
    """
    return kv_of(config).token_values(tensor_parallel) * _value_bytes(config, dtype)


def _value_bytes(config: Mapping[str, Any], dtype: str) -> int:
    """Return the bytes of a value of the KV; 0 if unknown."""
    text = text_of(config)
    kind = (text.get("dtype") or text.get("torch_dtype")) if dtype == "auto" else dtype
    return DTYPE_BYTES.get(str(kind), 0)
