"""The groups of a model's KV: whose blocks a request needs to go on, and under which keys they are pooled.

vLLM puts layers that keep KV in one way into groups, each with a table of blocks of its own.  A request that
goes on after so many tokens needs all blocks of a group of full attention, those within the window of a
sliding group, and of a recurrent group the state after the last of these tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import sha256
from math import lcm
from typing import TYPE_CHECKING

import attrs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from seer_core.errors import EngineError
from seer_vllm.blocks import KvPage

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

__all__ = [
    "NO_POOL",
    "KvGroup",
    "KvGroups",
    "bytes_per_token",
    "is_computed",
    "kv_groups",
    "pages_of",
    "room_of",
    "whole_group",
]

STATES = 2
"""Blocks of a recurrent group that a request holds where it goes from one to the next, at most."""
NO_POOL = 'set [seer].kv_pool = "none"'


@attrs.frozen
class KvGroup:
    """A group: its number in vLLM's tables, and the tokens of a block of it.

    ``reach`` is how many of the last tokens it still needs, None if it needs all.
    """

    number: int
    block_tokens: int
    reach: int | None = None
    recurrent: bool = False

    def needed(self, tokens: int, first: int = 0) -> range:
        """Return the blocks without which nothing goes on after ``tokens``, those before ``first`` left out.

        ``tokens`` fill whole blocks.
        """
        begin = 0 if self.reach is None else max(0, tokens - self.reach) // self.block_tokens
        return range(max(begin, first // self.block_tokens), tokens // self.block_tokens)


@attrs.frozen
class KvGroups:
    """All groups of a model; the first one is of full attention, and its keys are vLLM's own."""

    first: KvGroup
    others: tuple[KvGroup, ...]
    hash_tokens: int
    """The tokens of each of a request's hashes."""

    @property
    def step_tokens(self) -> int:
        """A request can go on after so many tokens, and any multiple."""
        return lcm(*(group.block_tokens for group in self.all))

    @property
    def all(self) -> tuple[KvGroup, ...]:
        """The groups, the first one first; this order numbers the rows of blocks."""
        return (self.first, *self.others)

    @property
    def recurrent(self) -> bool:
        """Whether a group keeps states, which vLLM copies when a step begins."""
        return any(group.recurrent for group in self.others)

    def keys(self, hashes: Sequence[bytes], group: KvGroup, blocks: Sequence[int]) -> list[bytes]:
        """Return the keys of blocks, by the hashes of all tokens of a request."""
        each = group.block_tokens // self.hash_tokens
        ends = [hashes[(block + 1) * each - 1] for block in blocks]
        if group is self.first:
            return ends
        name = group.number.to_bytes(2, "little")
        return [sha256(end + name).digest() for end in ends]

    def full_blocks(self, hashes: Sequence[bytes], group: KvGroup) -> int:
        """Return how many blocks of a group have a hash."""
        return len(hashes) * self.hash_tokens // group.block_tokens

    def rests(self, tokens: int, before: int) -> Iterator[int]:
        """Yield the places where a request can go on, from ``tokens`` down to those above ``before``."""
        yield from range(tokens - tokens % self.step_tokens, before, -self.step_tokens)


def kv_groups(config: KVCacheConfig, hash_tokens: int) -> KvGroups:
    """Return the groups of a model whose KV can be pooled.

    Raises:
        EngineError: one of them keeps something else.
    """
    groups = [_group(number, each.kv_cache_spec) for number, each in enumerate(config.kv_cache_groups)]
    full = [group for group in groups if group is not None and group.reach is None and not group.recurrent]
    kinds = ", ".join(dict.fromkeys(type(each.kv_cache_spec).__name__ for each in config.kv_cache_groups))
    if None in groups or not full:
        raise EngineError(
            f"the model's KV is of the kinds {kinds}; a pool keeps full attention, with sliding windows or"
            f" recurrent states beside it: {NO_POOL}"
        )
    first = full[0]
    return KvGroups(
        first, tuple(group for group in groups if group is not None and group is not first), hash_tokens
    )


def _group(number: int, spec: KVCacheSpec) -> KvGroup | None:
    if type(spec) in (FullAttentionSpec, MLAAttentionSpec):
        return KvGroup(number, spec.block_size)
    if type(spec) is SlidingWindowSpec and not spec.extra_retained_tokens:
        return KvGroup(number, spec.block_size, spec.sliding_window - 1)
    if isinstance(spec, MambaSpec) and spec.mamba_cache_mode == "align":
        return KvGroup(number, spec.block_size, 1, recurrent=True)
    return None


def whole_group(config: KVCacheConfig) -> int:
    """Return the number of the first group that keeps every token's KV.

    Raises:
        EngineError: there is none.
    """
    for number, group in enumerate(config.kv_cache_groups):
        if isinstance(group.kv_cache_spec, FullAttentionSpec):
            return number
    raise EngineError(
        "experts are kept beside the KV of full attention, which this model has not: drop"
        " enable_return_routed_experts from engine_args"
    )


def is_computed(block: KVCacheBlock, table: Sequence[int]) -> bool:
    """Return whether a block of vLLM's cache surely has its KV while a step is being planned.

    The cache has a block from when the step is planned that will fill it.  Those of the request itself, whose
    ``table`` has them, were filled by steps before; what another request holds may be empty yet.
    """
    return not block.ref_cnt or block.block_id in table


def pages_of(config: KVCacheConfig, groups: KvGroups) -> list[list[KvPage]]:
    """Return where the layers of each group keep a block.

    Raises:
        EngineError: a layer is not where vLLM says that layers are.
    """
    places = {
        layer: (tensor, tensor.offset + number * tensor.layer_stride)
        for tensor in config.kv_cache_tensors
        for number, layer in enumerate(tensor.layers)
    }
    found = []
    for group in groups.all:
        layers = config.kv_cache_groups[group.number]
        lost = [name for name in layers.layer_names if name not in places]
        if lost:
            raise EngineError(
                f"vLLM does not say where the KV of {lost[0]} is, and it cannot be pooled: {NO_POOL}"
            )
        size = layers.kv_cache_spec.page_size_bytes
        found.append(
            [
                KvPage(name, offset, tensor.block_stride, size)
                for name in layers.layer_names
                for tensor, offset in [places[name]]
            ]
        )
    return found


def room_of(
    config: KVCacheConfig, block_tokens: int, slots: int, longest: int, step_tokens: int
) -> tuple[int, int]:
    """Return how many tokens of requests fit, however long each is, and for how many requests at a time.

    A window holds no more of a request than itself, and a step's prefill besides; a state takes as much of
    every request.  ``slots`` are the most requests.  They are fewer where their states would take more than
    half of the memory, or leave no room for the ``longest`` context.
    """
    blocks = config.num_blocks - 1  # the first block is vLLM's null block
    specs = [group.kv_cache_spec for group in config.kv_cache_groups]
    states = STATES * sum(isinstance(spec, MambaSpec) for spec in specs)

    def used(tokens: int, requests: int) -> int:
        total = requests * states
        for spec in specs:
            if isinstance(spec, SlidingWindowSpec):
                window = -(-spec.sliding_window // spec.block_size) * spec.block_size + spec.block_size
                total += -(-min(tokens, requests * window + step_tokens) // spec.block_size)
            elif not isinstance(spec, MambaSpec):
                total += -(-tokens // spec.block_size)
        return total

    def fitting(requests: int) -> int:
        least, most = 0, blocks
        while least < most:
            middle = (least + most + 1) // 2
            if used(middle * block_tokens, requests) <= blocks:
                least = middle
            else:
                most = middle - 1
        return least * block_tokens

    if states:
        slots = max(1, min(slots, blocks // (2 * states)))
    while slots > 1 and fitting(slots) < min(longest, fitting(1)):
        slots //= 2
    return fitting(slots), slots


def bytes_per_token(config: KVCacheConfig) -> int:
    """Return the bytes that each further token of a long context takes on a rank: no window, no state."""
    return sum(
        group.kv_cache_spec.page_size_bytes * len(group.layer_names) // group.kv_cache_spec.block_size
        for group in config.kv_cache_groups
        if not isinstance(group.kv_cache_spec, SlidingWindowSpec | MambaSpec)
    )
