"""The KV blocks of one instance: how many are in use, and whose old content the free ones still hold.

As in vLLM a free block keeps its content until it is used again.  Content goes by request id and
group id, not by a hash of tokens: a request finds its own blocks, and its group's prompt while any
sibling's copy is there.  A sibling's prompt saves computing, not memory (vLLM shares the blocks), and
empty blocks are used before any that hold content (vLLM keeps strict order of release).
"""

from __future__ import annotations

from collections import Counter, OrderedDict

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
        self.forget()

    def forget(self) -> None:
        """Free every block and forget all content."""
        self.free = self.capacity
        self._empty = self.capacity
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._prompts: Counter[str] = Counter()

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
                self._forget_prompt(kept.group_id)
            if not kept.blocks:
                del self._kept[request_id]

    def find(self, request_id: str, group_id: str, prompt_blocks: int, at_most: int) -> tuple[int, bool]:
        """Take back what a request that starts running can reuse, up to ``at_most`` blocks.

        Return the blocks that need no computing, and whether a prompt is already counted for it.  Own
        blocks are in use from now on; a sibling's prompt is still to be taken like new blocks.
        """
        kept = self._kept.pop(request_id, None)
        own = 0
        holds_prompt = False
        if kept is not None:
            own = min(kept.blocks, at_most)
            ...
        return own, holds_prompt

    def hold_prompt(self, group_id: str) -> None:
        """Count one more running or kept request that has the whole prompt of its group."""
        self._prompts[group_id] += 1

    def _forget_prompt(self, group_id: str) -> None:
        self._prompts[group_id] -= 1
        if not self._prompts[group_id]:
            del self._prompts[group_id]
