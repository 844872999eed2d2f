"""The most KV that any instance has for one more request, without a look at all instances."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

__all__ = ["MostFree"]


class MostFree:
    """The free KV of instances, in tokens, and the largest.

    The heap has stale entries, which are dropped when they come to its top.
    """

    def __init__(self) -> None:
        self._free: dict[str, int] = {}
        self._heap: list[tuple[int, str]] = []

    def note(self, name: str, tokens: int) -> None:
        """Note what an instance has for one more request; -1 where it has no slot, or is gone."""
        if self._free.get(name) == tokens:
            return
        self._free[name] = tokens
        if len(self._heap) > 64 + 4 * len(self._free):
            self._heap = [(-free, each) for each, free in self._free.items()]
            heapify(self._heap)
        else:
            heappush(self._heap, (-tokens, name))

    def most(self) -> int:
        """Return the largest, -1 if none has a slot."""
        heap, free = self._heap, self._free
        while heap and free[heap[0][1]] != -heap[0][0]:
            heappop(heap)
        return -heap[0][0] if heap else -1
