"""The parts of an instance's KV that its ranks have, with tensor parallelism.

A block in a pool is the parts of all ranks, one after the other, under one key.  So it is there with all its
parts or not at all, and one checksum is about all of them.
"""

from __future__ import annotations

import attrs

__all__ = ["KvParts"]


@attrs.frozen
class KvParts:
    """Each rank has one part of every block; of fewer parts than ranks, several ranks have the same."""

    engine: str
    ranks: int = 1
    parts: int = 1
    dtype: str = ""
    """In which KV is kept; two of them may be alike in size."""

    @property
    def layout(self) -> str:
        """The name of how weights and KV are laid out over ranks."""
        return self.engine if self.ranks == 1 else f"{self.engine}-tp{self.ranks}"

    @property
    def kind(self) -> str:
        """The name of this KV, as ``InstanceInfo.kv_kind`` has it, and with it the keys in a pool."""
        return "-".join(filter(None, (self.layout, self.dtype)))

    def columns(self, rank: int, block_bytes: int) -> slice:
        """Return where the part of a rank lies in a block of ``block_bytes``, those of all parts."""
        size = block_bytes // self.parts
        begin = rank * self.parts // self.ranks * size
        return slice(begin, begin + size)

    def is_first(self, rank: int) -> bool:
        """Return whether a rank is the first of those that have its part."""
        return rank % (self.ranks // self.parts) == 0
