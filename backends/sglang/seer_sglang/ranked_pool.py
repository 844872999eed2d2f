"""The KV pool of an instance of several ranks: rank 0 alone asks the store, and each copies its part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import structlog
from seer_worker.process.kv_parts import KvParts
from seer_worker.process.pooling import FetchedBlocks, PooledRequests
from seer_worker.process.shared_blocks import SharedBlocks
from seer_worker.process.stores import FailsafeStore

from seer_core.errors import EngineError
from seer_core.ports.kv import Bytes, KVStore
from seer_sglang.ranks import Flaw, FollowingRank, LeadingRank

__all__ = ["FollowingPool", "LeadingPool", "RankPool"]

log = structlog.get_logger("seer")


class RankPool(Protocol):
    """A rank's access to the pool; blocks are this rank's parts, uint8 [n, its bytes]."""

    def stage(self, request_id: str, first: int, keys: Sequence[bytes]) -> int | None:
        """Do as ``PooledRequests.stage``."""
        ...

    def unstage(self, request_id: str) -> None:
        """Stage nothing for a request any more."""
        ...

    def load(self, request_id: str) -> Bytes:
        """Return the blocks that are staged for a request, to be loaded at once."""
        ...

    def save(self, keys: Sequence[bytes], read: Callable[[list[int]], Bytes]) -> None:
        """Do as ``PooledRequests.save``."""
        ...

    def save_beside(self, keys: Sequence[bytes], blocks: Bytes) -> None:
        """Do as ``PooledRequests.save_beside``."""
        ...

    def beyond_prompt(self, group_id: str, keys: Sequence[bytes], prompt_blocks: int) -> Sequence[bytes]:
        """Do as ``PooledRequests.beyond_prompt``."""
        ...

    def drop_with_group(self, group_id: str, keys: Sequence[bytes]) -> None:
        """Do as ``PooledRequests.drop_with_group``."""
        ...

    def drop(self, keys: Sequence[bytes]) -> None:
        """Do as ``PooledRequests.drop``."""
        ...


class LeadingPool(PooledRequests):
    """The pool in rank 0, which may be the only one."""

    def __init__(
        self,
        store: FailsafeStore,
        part_bytes: int,
        ranks: LeadingRank,
        parts: KvParts,
        awaited_bytes: int | None,
    ) -> None:
        """Use a store of blocks that have ``parts`` of ``part_bytes`` each.

        A request waits for more blocks than ``awaited_bytes`` hold; None: none waits.
        """
        self.block_bytes = part_bytes * parts.parts
        super().__init__(store, self.block_bytes)
        self.awaited_blocks = None if awaited_bytes is None else awaited_bytes // self.block_bytes
        self.shared = ranks.count > 1
        self._ranks = ranks
        self._columns = parts.columns(0, self.block_bytes)

    def stage(self, request_id: str, first: int, keys: Sequence[bytes]) -> int | None:
        """Copy out what the store has, for all ranks."""
        stage = super().stage
        return self._ranks.agreed(lambda: stage(request_id, first, keys))

    def unstage(self, request_id: str) -> None:
        """Stage nothing for a request any more."""
        self.take(request_id)

    def load(self, request_id: str) -> Bytes:
        """Return this rank's part of what is staged, and let the others have theirs."""
        staged = self.take(request_id)
        assert staged is not None
        self._ranks.send(staged)
        self._ranks.answers()  # the others hold its memory by then
        return staged.blocks[:, self._columns]

    def save(self, keys: Sequence[bytes], read: Callable[[list[int]], Bytes]) -> None:
        """Put the blocks that the store lacks, with the parts of all ranks."""

        def read_parts(lacking: list[int]) -> Bytes:
            into = SharedBlocks(len(lacking), self.block_bytes)
            self._ranks.send((lacking, into))
            try:
                into.blocks[:, self._columns] = read(lacking)
            finally:
                self._ranks.answers()
            return into.blocks

        super().save(keys, read_parts if self.shared else read)
        self._ranks.send(None)

    def save_beside(self, keys: Sequence[bytes], blocks: Bytes) -> None:
        """Put those of these blocks that the store lacks, with the parts of all ranks."""
        if self.shared:
            into = SharedBlocks(len(blocks), self.block_bytes)
            self._ranks.send(into)
            into.blocks[:, self._columns] = blocks
            blocks = into.blocks
            try:
                self._ranks.answers()
            except EngineError as error:
                self._give_up(error)
        super().save_beside(keys, blocks)

    def _give_up(self, error: EngineError) -> None:
        def fail(store: KVStore) -> None:
            raise error

        self.store.ask(fail, None)


class FollowingPool:
    """The pool in any other rank, which never asks the store."""

    def __init__(self, part_bytes: int, ranks: FollowingRank, parts: KvParts) -> None:
        self._ranks = ranks
        self._columns = parts.columns(ranks.number, part_bytes * parts.parts)
        self._writes = parts.is_first(ranks.number)

    def stage(self, request_id: str, first: int, keys: Sequence[bytes]) -> int | None:
        """Return what rank 0 has found."""
        found: int | None = self._ranks.receive()
        return found

    def unstage(self, request_id: str) -> None:
        """Do nothing."""

    def load(self, request_id: str) -> Bytes:
        """Return this rank's part of what rank 0 has staged."""
        fetched: FetchedBlocks = self._ranks.receive()
        self._ranks.answer()
        return fetched.blocks[:, self._columns]

    def save(self, keys: Sequence[bytes], read: Callable[[list[int]], Bytes]) -> None:
        """Write this rank's part of the blocks that the store lacks, if no other does."""
        while (asked := self._ranks.receive()) is not None:
            lacking, into = asked
            self._write(into, partial(read, lacking))

    def save_beside(self, keys: Sequence[bytes], blocks: Bytes) -> None:
        """Write this rank's part of these blocks, if no other does."""
        self._write(self._ranks.receive(), lambda: blocks)

    def beyond_prompt(self, group_id: str, keys: Sequence[bytes], prompt_blocks: int) -> Sequence[bytes]:
        """Return no keys: rank 0 drops them."""
        return ()

    def drop_with_group(self, group_id: str, keys: Sequence[bytes]) -> None:
        """Do nothing."""

    def drop(self, keys: Sequence[bytes]) -> None:
        """Do nothing."""

    def _write(self, into: Bytes, read: Callable[[], Bytes]) -> None:
        """Answer with the reason if it cannot be read, which costs the pool and no token."""
        flaw = None
        if self._writes:
            try:
                into[:, self._columns] = read()
            except Exception as error:
                log.exception("kv_not_read", rank=self._ranks.number)
                flaw = Flaw(f"cannot read its part of the KV: {type(error).__name__}: {error}")
        self._ranks.answer(flaw)
