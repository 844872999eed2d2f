"""The parts of an instance's KV that its ranks have, with tensor parallelism.

A block in a pool is the parts of all ranks, one after the other, under one key.  So it is there with all its
parts or not at all, and one checksum is about all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec

__all__ = ["KvParts", "parts_of"]


@attrs.frozen
class KvParts:
    """Each rank has one part of every block; of fewer parts than ranks, several ranks have the same."""

    ranks: int
    parts: int

    @property
    def layout(self) -> str:
        """The name of this layout of KV, as ``InstanceInfo.kv_kind`` has it."""
        return "vllm" if self.ranks == 1 else f"vllm-tp{self.ranks}"

    def columns(self, rank: int, block_bytes: int) -> slice:
        """Return where the part of a rank lies in a block of ``block_bytes``, those of all parts."""
        size = block_bytes // self.parts
        begin = rank * self.parts // self.ranks * size
        return slice(begin, begin + size)

    def is_first(self, rank: int) -> bool:
        """Return whether a rank is the first of those that have its part."""
        return rank % (self.ranks // self.parts) == 0


def parts_of(config: VllmConfig, spec: KVCacheSpec) -> KvParts:
    """Return the parts of KV of this kind.

    A model of fewer heads than ranks has each head on several of them, and latent KV (MLA) is on all.
    """
    ranks = config.parallel_config.tensor_parallel_size
    heads = 1 if config.model_config.use_mla else config.model_config.get_total_num_kv_heads()
    repeated = getattr(spec, "num_kv_heads", 0) == 1 and ranks % heads == 0
    return KvParts(ranks, heads if repeated else ranks)
