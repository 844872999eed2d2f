"""A queue that serves the request with the most left to generate."""

from __future__ import annotations

from heapq import heappop, heappush

from seer_core.model import Request
from seer_core.ports.policy import Prioritizer
from seer_rivals.expected_lengths import Remaining

__all__ = ["LongestRemaining"]


class LongestRemaining(Prioritizer):
    """Orders requests by the tokens that they are expected to have left, most first; ties by arrival.

    A decision costs O(log n) over n waiting requests.
    """

    def __init__(self, remaining: Remaining) -> None:
        self._remaining = remaining
        self._heap: list[tuple[float, int, Request]] = []
        self._keys: dict[int, float] = {}

    def push(self, request: Request) -> None:
        """Queue a request by what it is expected to have left now.

        Raises:
            PromptError: its group's lengths are not known.
        """
        key = -self._remaining(request)
        self._keys[request.seq] = key
        heappush(self._heap, (key, request.seq, request))

    def peek(self) -> Request | None:
        """Return the request with the most left."""
        heap = self._heap
        while heap and self._keys.get(heap[0][1]) != heap[0][0]:
            heappop(heap)
        return heap[0][2] if heap else None

    def take(self, request: Request) -> None:
        """Remove a request; one in the middle of the heap is skipped when it comes up."""
        del self._keys[request.seq]
        if self._heap[0][2] is request:
            heappop(self._heap)

    def __len__(self) -> int:
        return len(self._keys)
