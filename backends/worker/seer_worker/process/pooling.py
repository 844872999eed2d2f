"""The blocks that an instance has in the KV pool, by request and group; the engine's keys name them.

Blocks are copied out of the store, and checked, before the engine is promised a single token of them, so that
what is promised can always be loaded.  Many are copied beside the engine's steps, where it can wait for them.
They are written to the store before their request's end, or preemption, is reported, so that the instance
that goes on with the request finds them.  A response that is over is dropped from the store at once, its
prompt with the last of its group.  A response that stopped, but may go on behind an environment's answer, is
dropped with its group, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor

import attrs
import numpy as np
import structlog

from seer_core.ports.kv import Bytes, KVStore
from seer_worker.process.shared_blocks import SharedBlocks
from seer_worker.process.stores import FailsafeStore

__all__ = ["AWAITED_BYTES", "PAUSE_S", "FetchedBlocks", "PooledRequests"]

log = structlog.get_logger("seer")

AWAITED_BYTES = 32 << 20
"""A step begins with a request's load by default if it is no larger: a millisecond's copy at 32 GB/s."""
PAUSE_S = 0.001
"""So long is a step in which requests only wait for blocks."""

FETCHED_BYTES = 4 << 30
"""Blocks of requests that are not let in yet take so much memory, or those of one request."""


@attrs.frozen
class FetchedBlocks:
    """Blocks copied out of the store for a request, which its blocks from number ``first`` on will hold.

    There are ``count``, in the rows of ``memory`` from row ``skip`` on.
    """

    first: int
    memory: Bytes | SharedBlocks
    count: int
    skip: int = 0

    @property
    def blocks(self) -> Bytes:
        """The blocks, uint8 [count, block_bytes]."""
        rows = self.memory.blocks if isinstance(self.memory, SharedBlocks) else self.memory
        return rows[self.skip : self.skip + self.count]

    def from_block(self, first: int, most: int) -> FetchedBlocks | None:
        """Return so many from another number on at most, None if that is before them."""
        passed = first - self.first
        if passed < 0:
            return None
        return FetchedBlocks(first, self.memory, min(most, max(0, self.count - passed)), self.skip + passed)


class PooledRequests:
    """The requests of an instance whose KV may be in the pool, and the prompts of their groups."""

    def __init__(self, store: FailsafeStore, block_bytes: int) -> None:
        self.store = store
        self.awaited_blocks: int | None = None
        """More blocks than these are copied out beside the engine's steps; None: all are copied at once."""
        self.shared = False
        """Whether blocks are copied into memory that other processes can read."""
        self._block_bytes = block_bytes
        self._staged: dict[str, FetchedBlocks] = {}
        self._coming: dict[str, tuple[int, Future[FetchedBlocks]]] = {}
        self._found: dict[str, tuple[int, int]] = {}
        """Of requests that wait for memory: their first block, and how many the store had from there on."""
        self._fetches: Executor = ThreadPoolExecutor(1, "seer-kv-fetch")
        self._saves: Executor = ThreadPoolExecutor(1, "seer-kv-save")
        self._saving: Future[None] | None = None
        self._prompts: dict[str, Sequence[bytes]] = {}
        self._turns: dict[str, dict[bytes, None]] = {}

    def work_in(self, fetches: Executor, saves: Executor) -> None:
        """Copy blocks out, and put them, in these from now on; not in threads."""
        self._fetches, self._saves = fetches, saves

    def stage(self, request_id: str, first: int, keys: Sequence[bytes]) -> int | None:
        """Copy out what the store has of ``keys``, those of a request from its block ``first`` on.

        Return the number of blocks that ``take`` will return; None: they are being copied, ask again.  A
        second call copies nothing that the first has copied.
        """
        if request_id in self._coming:
            _, coming = self._coming[request_id]
            if not coming.done():
                return None
            del self._coming[request_id]
            self._staged[request_id] = coming.result()
        staged = self._staged.pop(request_id, None)
        found = None if staged is None else staged.from_block(first, len(keys))
        if found is None:
            there = self._find(request_id, first, keys)
            if self.awaited_blocks is not None and there > self.awaited_blocks:
                self._fetch_beside(request_id, first, keys[:there])
                return None
            found = self._fetch(first, keys[:there])
        self._staged[request_id] = found
        return found.count

    def take(self, request_id: str) -> FetchedBlocks | None:
        """Return what is staged, to be loaded, and stage nothing any more."""
        self._found.pop(request_id, None)
        if request_id in self._coming:
            self._coming.pop(request_id)[1].cancel()
        return self._staged.pop(request_id, None)

    def close(self) -> None:
        """Wait until nothing is copied any more."""
        self._fetches.shutdown(cancel_futures=True)
        self._saves.shutdown(cancel_futures=True)

    def _find(self, request_id: str, first: int, keys: Sequence[bytes]) -> int:
        """Return how many the store has, which is asked but once for a request that waits for memory."""
        asked, there = self._found.pop(request_id, (-1, 0))
        return there if asked == first else self.store.find(keys)

    def _fetch_beside(self, request_id: str, first: int, keys: Sequence[bytes]) -> None:
        """Begin to copy, unless too much waits to be let in already."""
        held = [each.count for each in self._staged.values()] + [each for each, _ in self._coming.values()]
        if held and (sum(held) + len(keys)) * self._block_bytes > FETCHED_BYTES:
            self._found[request_id] = first, len(keys)
            return
        self._coming[request_id] = len(keys), self._fetches.submit(self._fetch, first, keys)

    def _fetch(self, first: int, keys: Sequence[bytes]) -> FetchedBlocks:
        shape = len(keys), self._block_bytes
        try:
            memory = SharedBlocks(*shape) if self.shared and keys else np.empty(shape, np.uint8)
        except (OSError, MemoryError) as error:
            log.warning("kv_not_fetched", blocks=len(keys), error=str(error))
            return self._fetch(first, [])
        rows = memory.blocks if isinstance(memory, SharedBlocks) else memory
        return FetchedBlocks(first, memory, self.store.get(keys, rows))

    def save(self, keys: Sequence[bytes], read: Callable[[list[int]], Bytes]) -> None:
        """Put the blocks that the store lacks; ``read`` returns those of these positions in ``keys``."""
        self._end_save()
        self._put(keys, read)

    def save_beside(self, keys: Sequence[bytes], blocks: Bytes) -> None:
        """Put those of these blocks that the store lacks, while the engine makes its next step.

        What is saved or dropped after them finds them put, and ``blocks`` may change when the next are given.
        """
        self._end_save()
        if self.awaited_blocks is None:
            self._put(keys, blocks.__getitem__)
            return
        self._saving = self._saves.submit(self._put, keys, blocks.__getitem__)

    def _put(self, keys: Sequence[bytes], read: Callable[[list[int]], Bytes]) -> None:
        def put(store: KVStore) -> None:
            lacking = store.lacks(keys)
            if lacking:
                store.put([keys[i] for i in lacking], read(lacking))

        self.store.ask(put, None)

    def _end_save(self) -> None:
        """Wait for what is being put."""
        if self._saving is not None:
            self._saving.result()
            self._saving = None

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
            self._end_save()
            self.store.ask(lambda store: store.drop(keys), None)

    def forget_group(self, group_id: str) -> None:
        """Drop the prompt of a group that is over, and what its turns have left."""
        self.drop([*self._prompts.pop(group_id, ()), *self._turns.pop(group_id, ())])

    def reset(self) -> None:
        """Forget all groups; their blocks stay."""
        self._prompts.clear()
        self._turns.clear()
