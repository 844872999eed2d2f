"""Oracle longest first: what scheduling could do if every length were known beforehand."""

from __future__ import annotations

from heapq import heappop, heappush

from seer_core.errors import PromptError
from seer_core.model import Request
from seer_core.plugins.hookspecs import Startup, hookimpl
from seer_core.ports.policy import Prioritizer

__all__ = ["OracleLongestFirst"]

TIER = "supported"


class OracleLongestFirst(Prioritizer):
    """Orders requests by their true length, longest first; ties by arrival."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Request]] = []
        self._waiting: set[int] = set()

    def push(self, request: Request) -> None:
        """Take a waiting request whose group's lengths are known."""
        lengths = request.group.known_lengths
        if lengths is None or request.index >= len(lengths):
            raise PromptError(
                f"plug-in 'oracle_longest_first' needs the true lengths of group {request.group.id!r}, one"
                " for each response; use it in `seer compare`, which learns them from its baseline, or with"
                " --oracle in `seer sim`"
            )
        self._waiting.add(request.seq)
        heappush(self._heap, (-lengths[request.index], request.seq, request))

    def peek(self) -> Request | None:
        """Return the longest waiting request."""
        while self._heap and self._heap[0][1] not in self._waiting:
            heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def take(self, request: Request) -> None:
        """Remove a request; one in the middle of the heap is skipped when it comes up."""
        self._waiting.remove(request.seq)
        if self._heap[0][2] is request:
            heappop(self._heap)

    def __len__(self) -> int:
        return len(self._waiting)


@hookimpl
def seer_make_prioritizer(settings: object, startup: Startup) -> OracleLongestFirst:
    """Order requests by their known lengths."""
    return OracleLongestFirst()
