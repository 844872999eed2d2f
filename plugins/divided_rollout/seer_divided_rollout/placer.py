"""The placer: a chunk goes where it fits whole, so that no engine ever has to preempt."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from seer_core.errors import ConfigError
from seer_core.model import InstanceStatus, Request

__all__ = ["KvAware"]

Key = tuple[int, int, int]
HOME = "home"


class KvAware:
    """Chooses the instance with the most free KV, or the request's own while loads are close.

    A request whose KV is not there is let in only if, for each request in flight there,
    ``growth_headroom`` chunks stay free: an instance filled to the brim has no room for anyone's next
    chunk, so all would have to move.  Both this and how far loads may be apart hold for moves that prefill
    everything again; where instances share KV they shrink to what a move costs there, as a share of that
    (``InstanceInfo.move_cost``).  Among equals the least recently chosen wins.

    A heap of (-free KV, last choice, instance) is kept up to date lazily, so a decision costs O(log n) over n
    instances.
    """

    def __init__(self, chunk_tokens: int, stay_kv_fraction: float, growth_headroom: float = 0.0) -> None:
        self.chunk_tokens = chunk_tokens
        self.stay_kv_fraction = stay_kv_fraction
        self.growth_headroom = growth_headroom
        self._instances: dict[int, InstanceStatus] = {}
        self._by_id: dict[str, InstanceStatus] = {}
        self._keys: dict[int, Key | None] = {}
        self._chosen: dict[int, int] = {}
        self._choices = 0
        self._heap: list[Key] = []
        self.why = ""
        """Why the last choice: ``home``, the request's own instance; otherwise the emptiest one, for the
        request is ``new`` or its own is ``lost``, is ``full``, or has so much less free that they are too far
        ``apart``.  With one instance ``only``."""

    def instance_changed(self, instance: InstanceStatus) -> None:
        """Take in an instance's new load; one without a free slot is out of the running."""
        seq, info = instance.seq, instance.info
        if seq not in self._instances:
            self._admit(instance)
        key = None
        if instance.running < info.max_running:
            key = (instance.reserved_kv_tokens - info.kv_capacity_tokens, self._chosen[seq], seq)
        if key == self._keys[seq]:
            return
        self._keys[seq] = key
        if key is not None:
            heappush(self._heap, key)
            if len(self._heap) > 64 + 4 * len(self._instances):
                self._heap = [live for live in self._keys.values() if live is not None]
                heapify(self._heap)

    def instance_lost(self, instance: InstanceStatus) -> None:
        """Forget the instance."""
        for table in (self._instances, self._keys, self._chosen):
            table.pop(instance.seq, None)
        self._by_id.pop(instance.id, None)

    def place(
        self, request: Request, chunk_tokens: int, instances: Sequence[InstanceStatus]
    ) -> InstanceStatus | None:
        """Return the instance for this chunk, or None while it fits nowhere."""
        best = self._emptiest()
        if best is None:
            return None
        free = -self._heap[0][0]
        home = self._by_id.get(request.instance) if request.instance is not None else None
        why = self._why_not(home, best, request, chunk_tokens)
        if home is not None and why == HOME:
            best = home
        else:
            needed = best.footprint(request, chunk_tokens)
            if needed > free or (home is not best and needed + self._headroom(best) > free):
                return None
        self.why = "only" if len(self._instances) == 1 else why
        self._choices += 1
        self._chosen[best.seq] = self._choices
        return best

    def _why_not(
        self, home: InstanceStatus | None, best: InstanceStatus, request: Request, chunk_tokens: int
    ) -> str:
        """Return why a request leaves its home for the emptiest instance, or that it does not."""
        if home is None:
            return "new" if request.instance is None else "lost"
        if home.free_slots <= 0 or home.footprint(request, chunk_tokens) > home.free_kv_tokens:
            return "full"
        apart = best.free_kv_tokens - home.free_kv_tokens
        near = self.stay_kv_fraction * best.info.move_cost * home.info.kv_capacity_tokens
        return HOME if apart <= near else "apart"

    def _headroom(self, instance: InstanceStatus) -> float:
        """KV tokens to leave free for a stranger's sake, so that what runs there can go on growing."""
        return self.growth_headroom * instance.info.move_cost * self.chunk_tokens * instance.running

    def _emptiest(self) -> InstanceStatus | None:
        while self._heap:
            key = self._heap[0]
            if self._keys.get(key[2]) == key:
                return self._instances[key[2]]
            heappop(self._heap)
        return None

    def _admit(self, instance: InstanceStatus) -> None:
        block = instance.info.block_tokens
        if -(-self.chunk_tokens // block) * block > instance.info.kv_capacity_tokens:
            raise ConfigError(
                f"[plugin.divided_rollout].chunk_tokens is {self.chunk_tokens}, but the KV cache of"
                f" instance {instance.id!r} holds {instance.info.kv_capacity_tokens} tokens; make chunks"
                " smaller or give the engine more KV"
            )
        self._instances[instance.seq] = self._by_id[instance.id] = instance
        self._chosen[instance.seq] = 0
        self._keys[instance.seq] = None
