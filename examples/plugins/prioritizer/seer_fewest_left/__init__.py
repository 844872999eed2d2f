"""The request with the fewest tokens left first."""

from heapq import heappop, heappush

from seer_core.model import Request
from seer_core.plugins.hookspecs import hookimpl
from seer_core.ports.policy import Prioritizer


class FewestLeft(Prioritizer):
    """Prioritizer by tokens left; ties by arrival.  A decision costs O(log n) over n waiting requests."""

    def __init__(self) -> None:
        self._waiting: dict[int, Request] = {}
        self._heap: list[tuple[int, int]] = []

    def push(self, request: Request) -> None:
        """Queue a waiting request."""
        self._waiting[request.seq] = request
        heappush(self._heap, (request.remaining_tokens, request.seq))

    def peek(self) -> Request | None:
        """Return the next request; entries of those taken meanwhile are dropped when they come up."""
        while self._heap:
            left, seq = self._heap[0]
            request = self._waiting.get(seq)
            if request is not None and request.remaining_tokens == left:
                return request
            heappop(self._heap)
        return None

    def take(self, request: Request) -> None:
        """Remove a waiting request."""
        del self._waiting[request.seq]

    def __len__(self) -> int:
        return len(self._waiting)


@hookimpl
def seer_make_prioritizer() -> Prioritizer:
    """Fill the slot."""
    return FewestLeft()
