"""The KV pool of simulated instances, and the plug-in ``sim_pool`` that makes it.

A request's KV is put whole when one of its chunks ends, and dropped when its response does.  It stays in
memory, then on disk, and what finds room in neither is lost: longest unused first.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta, Struct

from seer_core.errors import EngineError
from seer_core.plugins.config_types import NotNegative, Positive
from seer_core.plugins.hookspecs import Startup, hookimpl
from seer_core.ports.kv import PoolStats, StoreSpec

__all__ = ["MoveRates", "Settings", "SimKVPool", "seer_make_kv_pool"]

TIER = "supported"

Bytes = Annotated[int, Meta(ge=0)]


class MoveRates(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The time of moving KV between one instance and the pool.

    The defaults are assumed: half of a 400 Gbit/s network card, and some round trips.
    """

    bandwidth_bytes_per_s: Positive = 25e9
    """The rate at which an instance loads blocks from the pool and saves them to it."""
    latency_s: NotNegative = 2e-3
    """The time that a load takes besides its bytes."""


class Settings(MoveRates, frozen=True, forbid_unknown_fields=True):
    """``[kv_pool.sim_pool]``: capacities of the whole cluster, rates of one instance.

    By default the memory and the disk of one node of the paper; the disk's rate is one NVMe disk's reading.
    """

    dram_bytes: Bytes = 2 * 10**12
    """The memory of the pool, over the whole cluster."""
    ssd_bytes: Bytes = 4 * 10**12
    """The disk of the pool, over the whole cluster; 0 for none."""
    ssd_bytes_per_s: Positive = 3e9
    """The rate at which an instance loads blocks from disk."""
    spans_nodes: bool = True
    """Whether an instance finds what those of other nodes have put; if not, there is a pool on each node."""


class _Kept(Struct, frozen=True):
    """The full blocks of a request's KV, and the weights they were computed with."""

    blocks: int
    kv_bytes: int
    version: int
    node: str


class _Tier:
    """So many bytes, the longest unused first."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.kept: OrderedDict[str, _Kept] = OrderedDict()

    def put(self, request_id: str, kept: _Kept) -> list[tuple[str, _Kept]]:
        """Keep what is not there yet; return what has to go for it, perhaps itself."""
        self.kept[request_id] = kept
        self.used_bytes += kept.kv_bytes
        gone = []
        while self.used_bytes > self.capacity_bytes:
            oldest, lost = self.kept.popitem(last=False)
            self.used_bytes -= lost.kv_bytes
            gone.append((oldest, lost))
        return gone

    def take(self, request_id: str) -> _Kept | None:
        """Give up what is there."""
        kept = self.kept.pop(request_id, None)
        if kept is not None:
            self.used_bytes -= kept.kv_bytes
        return kept


class SimKVPool:
    """A KVPool that simulated engines ask directly; bytes are counted, not kept.

    Requests find their own KV, by id; what siblings share of a prompt is not shared here.  Writing goes on
    behind the steps and takes no time.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._counts: Counter[str] = Counter()
        self._forget()

    def _forget(self) -> None:
        self._dram = _Tier(self.settings.dram_bytes)
        self._ssd = _Tier(self.settings.ssd_bytes)
        self._groups: dict[str, set[str]] = {}

    async def start(self, instances: Sequence[str]) -> None:
        """Begin without any KV."""
        self._forget()

    async def stop(self) -> None:
        """Drop all KV."""
        self._forget()

    async def clear(self) -> None:
        """Forget all KV."""
        self._forget()

    def store(self, instance_id: str) -> StoreSpec:
        """Raise ``EngineError``: there is nothing that a real engine could load."""
        raise EngineError(
            f"instance {instance_id!r} is real and the KV pool 'sim_pool' is not;"
            ' write kv_pool = "local" for real engines'
        )

    def stats(self) -> PoolStats:
        """Return the pool in figures."""
        return PoolStats(
            self.settings.dram_bytes,
            self._dram.used_bytes,
            disk_capacity_bytes=self.settings.ssd_bytes,
            disk_used_bytes=self._ssd.used_bytes,
            **self._counts,
        )

    # What engines ask.

    def look(self, request_id: str, version: int, wanted_blocks: int, node: str = "") -> int:
        """Return how many of so many blocks of a request ``node`` finds, computed with these weights."""
        kept = self._dram.kept.get(request_id) or self._ssd.kept.get(request_id)
        if kept is None or kept.version != version or not self._within_reach(kept, node):
            return 0
        return min(kept.blocks, wanted_blocks)

    def find(self, request_id: str, version: int, wanted_blocks: int, node: str = "") -> int:
        """Return the same, and count it as a search."""
        found = self.look(request_id, version, wanted_blocks, node)
        self._counts["asked_blocks"] += wanted_blocks
        self._counts["hit_blocks"] += found
        return found

    def fetch_s(self, request_id: str, kv_bytes: int) -> float:
        """Return the seconds that it takes to bring so much of a request's KV, which is there."""
        rate = self.settings.bandwidth_bytes_per_s
        self._counts["got_bytes"] += kv_bytes
        if request_id in self._dram.kept:
            self._dram.kept.move_to_end(request_id)
        else:
            rate = min(rate, self.settings.ssd_bytes_per_s)
            self._counts["disk_got_bytes"] += kv_bytes
            kept = self._ssd.take(request_id)
            assert kept is not None
            self._put(request_id, kept)
        return self.settings.latency_s + kv_bytes / rate

    def put(
        self, request_id: str, version: int, blocks: int, block_bytes: int, node: str = "", group_id: str = ""
    ) -> None:
        """Keep the first ``blocks`` of a request's KV, in memory, and no longer what another node has.

        ``forget_group`` of its group, or of its trajectory, drops it.
        """
        before, new = self._take(request_id), blocks
        if before is not None and before.version == version and self._within_reach(before, node):
            new -= before.blocks
        if new > 0:
            self._counts["put_bytes"] += new * block_bytes
        self._groups.setdefault(group_id, set()).add(request_id)
        self._put(request_id, _Kept(blocks, blocks * block_bytes, version, node))

    def drop(self, request_id: str) -> None:
        """Forget a request whose response is over."""
        kept = self._take(request_id)
        if kept is not None:
            self._counts["released_blocks"] += kept.blocks

    def forget_group(self, group_id: str) -> None:
        """Forget what is left of a group that is over."""
        for request_id in self._groups.pop(group_id, ()):
            self.drop(request_id)

    def _within_reach(self, kept: _Kept, node: str) -> bool:
        return self.settings.spans_nodes or kept.node == node

    def _put(self, request_id: str, kept: _Kept) -> None:
        for older_id, older in self._dram.put(request_id, kept):
            lost = self._ssd.put(older_id, older)
            self._counts["evicted_blocks"] += sum(each.blocks for _, each in lost)
            if older_id in self._ssd.kept:
                self._counts["disk_put_bytes"] += older.kv_bytes

    def _take(self, request_id: str) -> _Kept | None:
        return self._dram.take(request_id) or self._ssd.take(request_id)


@hookimpl
def seer_make_kv_pool(settings: Settings, startup: Startup) -> SimKVPool:
    """Return an empty pool."""
    return SimKVPool(settings)
