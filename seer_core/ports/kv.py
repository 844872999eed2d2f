"""KV shared by all instances of a run: what a pool, an engine and the core agree on.

A plug-in fills the slot ``kv_pool`` with a ``KVPool``, which lives beside the runtime.  It has an engine
half, a ``KVStore``, which is named by import path and made in each engine's process; so an engine depends on
these Protocols and never on the plug-in, and a pool never on an engine.  What travels are blocks: the KV of
``block_tokens`` tokens in a row, as bytes, under a key that stands for these tokens, for all tokens
before them, for the version of the weights and for the kind of engine, whose layout of KV is its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import msgspec

from seer_core.errors import ignore_report
from seer_core.ports.contracts import optional

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["KEY_BYTES", "LOOPBACK", "Bytes", "KVPool", "KVStore", "PoolStats", "StoreContext", "StoreSpec"]

KEY_BYTES = 32
"""Length of every key."""

LOOPBACK = "127.0.0.1"
"""The address of a node that has no other, for its instances are child processes of the runtime."""

Bytes: TypeAlias = "NDArray[np.uint8]"
"""Blocks, one row of bytes each."""


class PoolStats(msgspec.Struct, frozen=True):
    """A pool in figures.  Counts go on from its start."""

    capacity_bytes: int
    """The memory that the pool has."""
    used_bytes: int = 0
    """The memory that is in use now."""
    asked_blocks: int = 0
    """The keys given to ``KVStore.find``, those after a missing one too; ``lacks`` and ``get`` do not count.
    """
    hit_blocks: int = 0
    """The blocks that ``KVStore.find`` found."""
    torn_blocks: int = 0
    """Blocks that were found and, when copied, were damaged or replaced; each counts as a miss."""
    evicted_blocks: int = 0
    """Blocks that were lost to make room for others."""
    put_bytes: int = 0
    """The bytes that came in, into memory or disk."""
    got_bytes: int = 0
    """The bytes that went out, from memory or disk."""
    released_blocks: int = 0
    """Evicted blocks that had been dropped before, so that no request misses them."""
    disk_capacity_bytes: int = 0
    """The disk that the pool has below its memory."""
    disk_used_bytes: int = 0
    """The disk that is in use now."""
    disk_put_bytes: int = 0
    """The bytes that were written to disk."""
    disk_got_bytes: int = 0
    """The bytes that were read from disk."""
    disk_errors: int = 0
    """How often the disk could not be written or read."""

    def since(self, before: PoolStats) -> PoolStats:
        """Return these figures with only what has been counted since ``before``."""
        counts = {
            name: getattr(self, name) - getattr(before, name)
            for name in self.__struct_fields__
            if not name.endswith(("capacity_bytes", "used_bytes"))
        }
        return msgspec.structs.replace(self, **counts)


class StoreSpec(msgspec.Struct, frozen=True):
    """The engine half of a pool, by name: what an engine's process imports and what it is made with.

    ``path`` is ``package.module:Class``, a ``KVStore`` called with ``(settings, host)``; ``settings`` is
    plain data.
    """

    path: str
    settings: Mapping[str, Any]
    spans_nodes: bool = True
    """Whether instances on other nodes find what is put; if not, a move there costs a prefill."""


class StoreContext(msgspec.Struct, frozen=True):
    """The instance that a store works in.

    ``report(reason)`` lets the user see that the store does less than it should, as a ``DraftContext``'s
    does.
    """

    instance_id: str
    """The instance's id."""
    block_bytes: int
    """The bytes of a block of KV."""
    block_tokens: int
    """The tokens of a block."""
    report: Callable[[str], None] = ignore_report
    """Called with a reason when the store does less than it should."""
    node: str = ""
    """The node that the instance runs on, as ``InstanceInfo.node`` has it."""
    address: str = LOOPBACK
    """The address of this node, measured at the instance's connection to the runtime."""


class KVStore(Protocol):
    """One instance's end of the pool, in its engine's process; called by one thread at a time.

    Made by ``Class(settings, host)``.  A block that cannot be had, for any reason, is a miss and never an
    error; if a method raises all the same, the instance goes on without the pool and reports the reason to
    the runtime.
    """

    def find(self, keys: Sequence[bytes]) -> int:
        """Return how many of the keys, from the first on, are there, to the best of its knowledge."""
        ...

    def lacks(self, keys: Sequence[bytes]) -> list[int]:
        """Return the positions of those keys that are not there; the others count as used just now."""
        ...

    def put(self, keys: Sequence[bytes], blocks: Bytes) -> None:
        """Keep copies of ``blocks``, uint8 [keys, block_bytes]; evict others, or these, for want of room."""
        ...

    def get(self, keys: Sequence[bytes], blocks: Bytes) -> int:
        """Copy the blocks of these keys into ``blocks``, uint8 [keys, block_bytes], up to the first miss.

        Returns how many were copied; each is whole, and what was put under its key.
        """
        ...

    def drop(self, keys: Sequence[bytes]) -> None:
        """Take these keys, of any instance, for never asked for again: their room may go to others at once.

        A hint, best effort: a block that is asked for all the same may be there or not.
        """
        ...

    def close(self) -> None:
        """Release everything; what was put stays for the others."""
        ...

    @optional
    def receive(self, message: Mapping[str, int]) -> None:
        """Receive a message of the pool: numbers by name; see ``KVPool.connect``."""
        return

    @optional
    def take_message(self) -> Mapping[str, int]:
        """Return the numbers to send to the pool, by name, since this was last asked; there may be none.

        Asked for when chunks have ended, and every now and then.
        """
        return {}


class KVPool(Protocol):
    """KV for all instances of a run."""

    async def start(self, instances: Sequence[str]) -> None:
        """Make room for these instances; called before the engines start."""
        ...

    async def stop(self) -> None:
        """Give everything back, and leave nothing behind; idempotent, bounded."""
        ...

    def store(self, instance_id: str) -> StoreSpec:
        """Return what an engine's process makes; asked once per start of an instance."""
        ...

    @optional
    async def add(self, instance_id: str) -> None:
        """Make room for an instance that joins later; without this method such an instance shares no KV."""
        return

    async def clear(self) -> None:
        """Forget all KV: no block put before is found again.  All instances are idle."""
        ...

    def stats(self) -> PoolStats:
        """Return the pool in figures; before ``start`` and after ``stop`` as of then."""
        ...

    @optional
    def connect(self, instance_id: str, send: Callable[[Mapping[str, int]], None]) -> None:
        """Receive the line to an instance's store, at each of its starts, before it has a chunk.

        Over it counts and epochs travel on the engine's own wire, wherever the instance runs.  ``send`` never
        blocks, and an instance that is down receives nothing.  A store receives each message before it is
        asked for the KV of a chunk that is sent afterwards.
        """
        return

    @optional
    def receive(self, instance_id: str, message: Mapping[str, int]) -> None:
        """Receive a message of an instance's store; never blocks."""
        return
