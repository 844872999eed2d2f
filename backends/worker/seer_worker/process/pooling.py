"""The blocks that an instance has in the KV pool, by request and group; the engine's keys name them.

Blocks are copied out of the store, and checked, before the engine is promised a single token of them, so that
what is promised can always be loaded.  They are written to the store before their request's end, or
preemption, is reported, so that the instance that goes on with the request finds them.  A response that is
over is dropped from the store at once, its prompt with the last of its group.  A response that stopped, but
may go on behind an environment's answer, is dropped with its group, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from seer_core.ports.kv import Bytes, KVStore
from seer_worker.process.stores import FailsafeStore, PrefetchedBlocks

__all__ = ["PooledRequests"]


class PooledRequests:
    """The requests of an instance whose KV may be in the pool, and the prompts of their groups."""

    def __init__(self, store: FailsafeStore, block_bytes: int) -> None:
        self.store = store
        self._block_bytes = block_bytes
        self._staged: dict[str, PrefetchedBlocks] = {}
        self._prompts: dict[str, Sequence[bytes]] = {}
        self._turns: dict[str, dict[bytes, None]] = {}

    def stage(self, request_id: str, first: int, keys: Sequence[bytes]) -> int:
        """Copy out what the store has of ``keys``, those of a request from its block ``first`` on.

        Return the number of blocks that ``take`` will return.  A second call for the same ``first`` copies
        nothing.
        """
        staged = self._staged.get(request_id)
        if staged is None or staged.first != first:
            staged = self._staged[request_id] = PrefetchedBlocks(
                first, self.store.fetch(keys, self._block_bytes)
            )
        return len(staged.blocks)

    def take(self, request_id: str) -> PrefetchedBlocks | None:
        """Return what is staged, to be loaded, and stage nothing any more."""
        return self._staged.pop(request_id, None)

    def save(self, keys: Sequence[bytes], read: Callable[[list[int]], Bytes]) -> None:
        """Put the blocks that the store lacks; ``read`` returns those of these positions in ``keys``."""

        def save(store: KVStore) -> None:
            lacking = store.lacks(keys)
            if lacking:
                store.put([keys[i] for i in lacking], read(lacking))

        self.store.ask(save, None)

    def beyond_prompt(self, group_id: str, keys: Sequence[bytes], prompt_blocks: int) -> Sequence[bytes]:
        """Keep the keys of a group's prompt until ``forget_group``; return the other keys of a request."""
        self._prompts.setdefault(group_id, keys[:prompt_blocks])
        return keys[prompt_blocks:]

    def drop_with_group(self, group_id: str, keys: Sequence[bytes]) -> None:
        """Drop the blocks of a response that may go on only when its group is over."""
        self._turns.setdefault(group_id, {}).update(dict.fromkeys(keys))

    def drop(self, keys: Sequence[bytes]) -> None:
        """Drop blocks that no request needs any more."""
        if keys:
            self.store.ask(lambda store: store.drop(keys), None)

    def forget_group(self, group_id: str) -> None:
        """Drop the prompt of a group that is over, and what its turns have left."""
        self.drop([*self._prompts.pop(group_id, ()), *self._turns.pop(group_id, ())])

    def reset(self) -> None:
        """Forget all groups; their blocks stay."""
        self._prompts.clear()
        self._turns.clear()
