"""The pool on a cluster: instances on one node share their KV, and those of other nodes miss.

Nothing of the pool is on the runtime's machine but its figures.  Each store makes its own files, reports
where they are as it starts, and is introduced to the others of its node.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from seer_core.ports.kv import PoolStats, StoreSpec
from seer_kv_local.slot_table import NONCE_BYTES
from seer_kv_local.tiers import share_of

__all__ = ["NodePools"]

STORE = "seer_kv_local.node_store:NodeStore"

Send = Callable[[Mapping[str, int]], None]

USED = frozenset(("used_bytes", "disk_used_bytes"))
"""Counts that begin anew with an instance's files."""


class NodePools:
    """A ``KVPool`` whose memory belongs to the workers: a pool for each node, however many there are.

    What an instance put goes with its process, except for what others of its node have open: these read it
    until the instance is back.
    """

    def __init__(self, capacity_bytes: int, disk_bytes: int = 0, disk_path: str = "") -> None:
        self.capacity_bytes, self.disk_bytes, self.disk_path = capacity_bytes, disk_bytes, disk_path
        self._nonce = b""
        self._numbers: dict[str, int] = {}
        self._shares = 1
        self._epoch = 1
        self._places: dict[str, Mapping[str, int]] = {}
        self._lines: dict[str, Send] = {}
        self._counted: Counter[str] = Counter()
        self._used: dict[str, Counter[str]] = {}
        self._last = PoolStats(capacity_bytes, disk_capacity_bytes=disk_bytes)

    async def start(self, instances: Sequence[str]) -> None:
        """Make room for these instances: each takes its part on its own node as it starts."""
        await self.stop()
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._numbers = {name: number for number, name in enumerate(instances)}
        self._shares = len(instances)
        self._counted.clear()

    async def stop(self) -> None:
        """Forget all instances, with which their memory has gone."""
        self._last = self.stats()
        for table in (self._numbers, self._places, self._lines, self._used):
            table.clear()

    async def add(self, instance_id: str) -> None:
        """Let an instance that joins later take as much as one of the first."""
        self._numbers.setdefault(instance_id, len(self._numbers))

    def store(self, instance_id: str) -> StoreSpec:
        """Return what an instance needs to make its own files."""
        settings = {
            "size": share_of(self.capacity_bytes, self._shares),
            "disk_size": share_of(self.disk_bytes, self._shares) if self.disk_bytes else 0,
            "disk_path": self.disk_path,
            "nonce": self._nonce.hex(),
            "epoch": self._epoch,
            "capacity_bytes": self.capacity_bytes,
            "disk_bytes": self.disk_bytes,
        }
        return StoreSpec(STORE, settings, spans_nodes=False)

    async def clear(self) -> None:
        """Begin a new epoch: each store empties its files before its next chunk."""
        self._epoch += 1
        for send in self._lines.values():
            send({"epoch": self._epoch})

    def connect(self, instance_id: str, send: Send) -> None:
        """Send a store the epoch, and introduce it and the others of its node to each other."""
        send({"epoch": self._epoch})
        self._lines[instance_id] = send
        place = self._places.get(instance_id)
        for other, line in self._lines.items():
            if other == instance_id:
                continue
            theirs = self._places.get(other)
            if place is None or theirs is None or theirs["node"] != place["node"]:
                line({"forget": self._numbers[instance_id]})  # it may have been on that node before
                continue
            send({"peer": self._numbers[other], **theirs})
            line({"peer": self._numbers[instance_id], **place})

    def receive(self, instance_id: str, message: Mapping[str, int]) -> None:
        """Take in where a store's files are, which is its first message, or what it has counted."""
        if "node" in message:
            self._places[instance_id] = message
            self._used[instance_id] = Counter()
            return
        for name, count in message.items():
            table = self._used.setdefault(instance_id, Counter()) if name in USED else self._counted
            table[name] += count

    def stats(self) -> PoolStats:
        """Add up what the stores have counted."""
        if not self._numbers:
            return self._last
        joined = max(0, len(self._numbers) - self._shares)
        totals = dict(self._counted)
        for table in self._used.values():
            for name, count in table.items():
                totals[name] = totals.get(name, 0) + count
        return PoolStats(
            capacity_bytes=self.capacity_bytes + self.capacity_bytes // self._shares * joined,
            disk_capacity_bytes=self.disk_bytes + self.disk_bytes // self._shares * joined,
            **totals,
        )
