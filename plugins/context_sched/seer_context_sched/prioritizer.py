"""The prioritizer: the paper's Algorithm 2; the scheduler itself guards against starvation."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

import attrs

from seer_core.model import GroupContext, Request
from seer_core.ports.policy import Prioritizer

__all__ = ["ContextAware"]


@attrs.define(eq=False)
class Candidates:
    """A group's waiting requests, its probe excepted; furthest first, for their KV may still be warm.

    ``estimate`` is the key under which the group is in the heap of estimates, None where it is not.
    """

    group: GroupContext
    heap: list[tuple[int, int, Request]] = attrs.Factory(list)
    estimate: int | None = None


class ContextAware(Prioritizer):
    """Serves probes shortest first, then groups longest first; O(log n) per decision.

    Response 0 of each group is its probe.  While probes wait, the one with the fewest generated
    tokens is next; otherwise a request of the group with the largest estimate.  Heaps hold stale entries,
    which are dropped when they surface, or when a group is over and they outnumber the others.
    """

    def __init__(self) -> None:
        self._probes: list[tuple[int, int, Request]] = []
        self._groups: dict[int, Candidates] = {}
        self._longest: list[tuple[int, int]] = []
        self._waiting: set[int] = set()

    def push(self, request: Request) -> None:
        """Queue a waiting request: a probe with the probes, another with its group."""
        seq = request.seq
        self._waiting.add(seq)
        if request.index == 0:
            heappush(self._probes, (request.generated_tokens, seq, request))
            return
        group = self._groups.get(request.group.seq)
        if group is None:
            group = self._groups[request.group.seq] = Candidates(request.group)
        heappush(group.heap, (-request.generated_tokens, seq, request))
        self._enter(group)

    def peek(self) -> Request | None:
        """Return the request to serve next."""
        return (self._from_probes() if self._probes else None) or self._from_longest()

    def take(self, request: Request) -> None:
        """Remove a waiting request; one in the middle of its heap is skipped when it comes up."""
        self._waiting.remove(request.seq)
        heap = self._probes if request.index == 0 else self._groups[request.group.seq].heap
        if heap[0][2] is request:
            heappop(heap)

    def group_changed(self, group: GroupContext, request: Request) -> None:
        """Move the group to its new estimate; forget it when it is over."""
        if group.left == 0:
            self._groups.pop(group.seq, None)
            self._compact()
            return
        candidates = self._groups.get(group.seq)
        if candidates is not None and self._head(candidates) is not None:
            self._enter(candidates)

    def __len__(self) -> int:
        return len(self._waiting)

    def _enter(self, group: Candidates) -> None:
        """Put a group with a waiting request into the heap of estimates, under the present one."""
        context = group.group
        estimate = context.estimate_tokens
        if group.estimate != estimate:
            group.estimate = estimate
            heappush(self._longest, (-estimate, context.seq))

    def _head(self, group: Candidates) -> Request | None:
        heap, waiting = group.heap, self._waiting
        while heap:
            negative_tokens, seq, request = heap[0]
            if seq in waiting and -negative_tokens == request.generated_tokens:
                return request
            heappop(heap)
        return None

    def _from_probes(self) -> Request | None:
        probes, waiting = self._probes, self._waiting
        while probes:
            generated_tokens, seq, request = probes[0]
            if seq in waiting and generated_tokens == request.generated_tokens:
                return request
            heappop(probes)
        return None

    def _from_longest(self) -> Request | None:
        while self._longest:
            estimate, seq = self._longest[0]
            group = self._groups.get(seq)
            if group is not None and group.estimate == -estimate:
                request = self._head(group)
                if request is not None:
                    return request
                group.estimate = None
            heappop(self._longest)
        return None

    def _compact(self) -> None:
        groups = self._groups
        if len(self._longest) > 64 + 2 * len(groups):
            self._longest = [
                (-group.estimate, seq) for seq, group in groups.items() if group.estimate is not None
            ]
            heapify(self._longest)
        if len(self._probes) > 64 + 2 * len(self._waiting):
            self._probes = [entry for entry in self._probes if entry[1] in self._waiting]
            heapify(self._probes)
