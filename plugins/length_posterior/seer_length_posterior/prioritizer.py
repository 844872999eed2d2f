"""The prioritizer: the request with the longest plausible remainder is next."""

from __future__ import annotations

from collections import OrderedDict
from heapq import heapify, heappop, heappush

import attrs

from seer_core.model import GroupContext, Request, RequestState
from seer_length_posterior.bound import plausible_tokens

__all__ = ["LongestPlausible"]

FINISHED = RequestState.FINISHED


@attrs.define(eq=False)
class Group:
    """A group's waiting requests, fewest turns first, those sent out, and the tokens of all.

    The heap holds (tokens before this turn, minus tokens, sequence number, request).  ``sent`` maps a request
    that is out to the tokens it left with.  ``key`` is the one under which the group stands in the queue of
    groups, None where it does not stand.
    """

    context: GroupContext
    heap: list[tuple[int, int, int, Request]] = attrs.Factory(list)
    sent: dict[Request, int] = attrs.Factory(dict)
    tokens: int = 0
    key: float | None = None


class LongestPlausible:
    """Serves whatever may plausibly run longest from now on; O(log n) per decision.

    A request's remainder is its group's plausible length (see ``plausible_tokens``), at most ``max_tokens``,
    less what it has generated.  So groups that have taught nothing take turns, fewest tokens first, and
    groups that have shown to be short wait.  A turn lasts ``turn_tokens``: until it has generated so many, a
    request keeps its place.  Every ``guard_interval``-th decision goes to the request that has waited
    longest, so that a wrong estimate starves nobody.

    Heaps hold stale entries, which are dropped when they surface, or when they outnumber the others.  The end
    of a response looks at what its group has in flight.
    """

    def __init__(self, surprise: float, guard_interval: int, turn_tokens: int = 1) -> None:
        self.surprise = surprise
        self.turn_tokens = turn_tokens
        self.guard_interval = guard_interval
        self._waiting: OrderedDict[int, Request] = OrderedDict()
        self._groups: dict[int, Group] = {}
        self._queue: list[tuple[float, int]] = []
        self._decisions = 0

    def push(self, request: Request) -> None:
        """Take a waiting request, and learn what it has generated since it was sent."""
        self._waiting[request.seq] = request
        group = self._groups.get(request.group.seq)
        if group is None:
            group = self._groups[request.group.seq] = Group(request.group)
        generated = request.generated_tokens
        group.tokens += generated - group.sent.pop(request, generated)
        before = generated - generated % self.turn_tokens
        heappush(group.heap, (before, -generated, request.seq, request))
        self._enter(group)

    def peek(self) -> Request | None:
        """Return the request to serve next."""
        if self.guard_interval and self._decisions % self.guard_interval == self.guard_interval - 1:
            return next(iter(self._waiting.values()), None)
        queue = self._queue
        while queue:
            key, seq = queue[0]
            group = self._groups.get(seq)
            if group is not None and group.key == key:
                return group.heap[0][3]
            heappop(queue)
        return None

    def take(self, request: Request) -> None:
        """Remove a waiting request."""
        del self._waiting[request.seq]
        self._decisions += 1
        group = self._groups[request.group.seq]
        group.sent[request] = request.generated_tokens
        self._enter(group)

    def group_changed(self, group: GroupContext) -> None:
        """Learn the lengths of those that are over; forget the group with the last."""
        if group.left == 0:
            del self._groups[group.seq]
            return
        known = self._groups[group.seq]
        over = [request for request in known.sent if request.state is FINISHED]
        for request in over:
            known.tokens += request.generated_tokens - known.sent.pop(request)
        self._enter(known)

    def __len__(self) -> int:
        return len(self._waiting)

    def _enter(self, group: Group) -> None:
        """Stand in the queue of groups under the present key, or not at all if nothing waits."""
        heap, waiting = group.heap, self._waiting
        while heap and (heap[0][2] not in waiting or -heap[0][1] != heap[0][3].generated_tokens):
            heappop(heap)
        key = -self._remainder(group, heap[0][0]) if heap else None
        if key == group.key:
            return
        group.key = key
        if key is not None:
            heappush(self._queue, (key, group.context.seq))
            if len(self._queue) > 64 + 4 * len(self._groups):
                self._queue = [(each.key, seq) for seq, each in self._groups.items() if each.key is not None]
                heapify(self._queue)

    def _remainder(self, group: Group, before: int) -> float:
        """Return how many tokens a request of the group may plausibly have had left when its turn began."""
        context = group.context
        plausible = plausible_tokens(context.finished, group.tokens, self.surprise)
        return min(context.max_tokens, plausible) - before
