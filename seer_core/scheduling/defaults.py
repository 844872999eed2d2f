"""The core's own strategies: first come first served, whole requests, least loaded instance."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from seer_core.model import InstanceStatus, Request
from seer_core.ports.policy import Placer, Prioritizer, Splitter
from seer_core.scheduling.buffer import WAITING

__all__ = ["FirstComeFirstServed", "LeastLoaded", "WholeRequests"]


class WholeRequests(Splitter):
    """Splitter that does not split."""

    def split(self, request: Request) -> int:
        """Return all that is left."""
        return request.remaining_tokens


class FirstComeFirstServed(Prioritizer):
    """Prioritizer by arrival; a request between chunks keeps its first place."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, Request]] = []
        self._waiting = 0

    def push(self, request: Request) -> None:
        """Queue a waiting request."""
        self._waiting += 1
        heappush(self._heap, (request.seq, request))

    def peek(self) -> Request | None:
        """Return the earliest request."""
        heap = self._heap
        while heap and heap[0][1].state is not WAITING:
            heappop(heap)
        return heap[0][1] if heap else None

    def take(self, request: Request) -> None:
        """Remove a request; one in the middle of the heap is skipped when it comes up."""
        self._waiting -= 1
        if self._heap[0][1] is request:
            heappop(self._heap)

    def __len__(self) -> int:
        return self._waiting


class LeastLoaded(Placer):
    """Placer on the instance with the fewest chunks in flight, among those whose batch has a slot."""

    def place(
        self, request: Request, chunk_tokens: int, instances: Sequence[InstanceStatus]
    ) -> InstanceStatus | None:
        """Return the least loaded instance, or None while every batch is full."""
        free = (instance for instance in instances if instance.free_slots > 0)
        return min(free, key=lambda instance: (instance.running, instance.seq), default=None)
