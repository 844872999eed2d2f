"""The KV blocks of one instance: how many are in use, and whose old content the free ones still hold.

As in vLLM a free block keeps its content until it is used again.  Content goes by request id and
group id, not by a hash of tokens: a request finds its own blocks, and its group's prompt while any
sibling's copy is there.  A sibling's prompt saves computing, not memory (vLLM shares the blocks), and
empty blocks are used before any that hold content (vLLM keeps strict order of release).
"""

from __future__ import annotations

from collections import OrderedDict

__all__ = ["BlockPool"]


class _Kept:
    """Full blocks of a request that runs no more; ``prompt_blocks`` of them are its prompt."""

    __slots__ = ("blocks", "group_id", "prompt_blocks")

    def __init__(self, group_id: str, prompt_blocks: int, blocks: int) -> None:
        self.group_id = group_id
        self.prompt_blocks = prompt_blocks
        self.blocks = blocks


class BlockPool:
    """``capacity`` blocks, of which ``free`` may be taken, the longest unused content first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.free = capacity
        self._empty = capacity
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._prompt_holders: dict[str, set[str]] = {}

    @property
    def usage(self) -> float:
        """Fraction of the blocks in use."""
        return 1.0 - self.free / self.capacity

    def take(self, count: int) -> None:
        """Use ``count`` free blocks: empty ones, then the oldest request's, from its end."""
        assert count <= self.free, f"{count} KV blocks wanted, {self.free} free"
        self.free -= count
        self._empty -= count
        while self._empty < 0:
            request_id, kept = next(iter(self._kept.items()))
            before = kept.blocks
            kept.blocks = max(0, before + self._empty)
            self._empty += before - kept.blocks
            if before >= kept.prompt_blocks > kept.blocks:
                self._drop_prompt(request_id, kept.group_id)
            if not kept.blocks:
                del self._kept[request_id]

    def found(self, request_id: str, group_id: str, prompt_blocks: int, reusable: int) -> int:
        """Return how many of the first ``reusable`` blocks of a request are computed here."""
        kept = self._kept.get(request_id)
        own = min(kept.blocks, reusable) if kept is not None else 0
        return max(own, prompt_blocks if group_id in self._prompt_holders else 0)

    def admit(self, request_id: str, group_id: str, prompt_blocks: int, needed: int, reusable: int) -> int:
        """Use ``needed`` blocks for a request; return how many of the first ``reusable`` are computed."""
        found = prompt_blocks if group_id in self._prompt_holders else 0
        kept = self._kept.pop(request_id, None)
        own = 0
        if kept is not None:
            own = min(kept.blocks, reusable)
            self.free -= own
            self._empty += kept.blocks - own
        self.take(needed - own)
        return max(own, found)

    def hold_prompt(self, request_id: str, group_id: str) -> None:
        """Let siblings find the prompt's blocks, all computed now, while ``request_id`` has them."""
        self._prompt_holders.setdefault(group_id, set()).add(request_id)

    def release(self, request_id: str, group_id: str, prompt_blocks: int, held: int, computed: int) -> None:
        """Free the ``held`` blocks of a request; the first ``computed`` keep their content."""
        assert request_id not in self._kept, f"request {request_id!r} ran twice at a time"
        self.free += held
        self._empty += held - computed
        if computed:
            self._kept[request_id] = _Kept(group_id, prompt_blocks, computed)

    def _drop_prompt(self, request_id: str, group_id: str) -> None:
        holders = self._prompt_holders[group_id]
        holders.discard(request_id)
        if not holders:
            del self._prompt_holders[group_id]
