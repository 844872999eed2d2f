"""The places of an instance's chunks in a drawing."""

from __future__ import annotations

from heapq import heappop, heappush

import attrs

__all__ = ["ChunkSlots"]


@attrs.define(eq=False)
class ChunkSlots:
    """The lanes that an instance's chunks are drawn in: a chunk takes the first free one."""

    used: int = 0
    free: list[int] = attrs.Factory(list)
    of_request: dict[str, int] = attrs.Factory(dict)

    def take(self, request_id: str) -> None:
        """Give a lane to a chunk that begins."""
        if self.free:
            lane = heappop(self.free)
        else:
            self.used += 1
            lane = self.used
        self.of_request[request_id] = lane

    def give_back(self, request_id: str) -> int:
        """Take the lane of a chunk that is over, and return it."""
        lane = self.of_request.pop(request_id)
        heappush(self.free, lane)
        return lane
