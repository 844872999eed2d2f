"""What the core does with no plug-in: first come first served, whole requests, least loaded instance."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from seer_core.model import GroupContext, InstanceStatus, Request

__all__ = ["FirstComeFirstServed", "LeastLoaded", "WholeRequests"]


class WholeRequests:
    """Splitter that does not split."""

    def split(self, request: Request) -> int:
        """Return all that is left."""
        return request.remaining_tokens


class FirstComeFirstServed:
    """Prioritizer by arrival; a request between chunks keeps its first place."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, Request]] = []
        self._waiting: set[int] = set()

    def push(self, request: Request) -> None:
        """Take a waiting request."""
        self._waiting.add(request.seq)
        heappush(self._heap, (request.seq, request))

    def peek(self) -> Request | None:
        """Return the earliest request."""
        while self._heap and self._heap[0][0] not in self._waiting:
            heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def take(self, request: Request) -> None:
        """Remove a request; one in the middle of the heap is skipped when it comes up."""
        self._waiting.remove(request.seq)
        if self._heap[0][1] is request:
            heappop(self._heap)

    def group_changed(self, group: GroupContext, request: Request) -> None:
        """Arrival order does not depend on what is learnt."""

    def __len__(self) -> int:
        return len(self._waiting)


class LeastLoaded:
    """Placer on the instance with the fewest chunks in flight, among those whose batch has a slot."""

    def instance_changed(self, instance: InstanceStatus) -> None:
        """Loads are read when placing."""

    def instance_lost(self, instance: InstanceStatus) -> None:
        """Loads are read when placing."""

    def place(
        self, request: Request, chunk_tokens: int, instances: Sequence[InstanceStatus]
    ) -> InstanceStatus | None:
        """Return the least loaded instance, or None while every batch is full."""
        free = (instance for instance in instances if instance.free_slots > 0)
        return min(free, key=lambda instance: (instance.running, instance.seq), default=None)
