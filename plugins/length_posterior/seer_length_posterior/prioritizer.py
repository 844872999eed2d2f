"""The prioritizer: the request with the longest plausible remainder is next."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from weakref import WeakValueDictionary

import attrs

from seer_core.model import GroupContext, InstanceStatus, Request
from seer_core.ports.policy import Prioritizer
from seer_length_posterior.bound import GroupPosterior, Shapes

__all__ = ["LongestPlausible"]

TURNS = 8
"""The turns that the longest response takes where each begins with a prefill."""


@attrs.define(eq=False)
class SeenEnds:
    """The ``finished`` of the contexts of a family, or of the one of a group without, when last looked at."""

    finished: int


@attrs.define(eq=False)
class WaitingGroup:
    """A group's waiting requests, fewest turns first, those sent out, and the lengths of all.

    The heap holds (tokens before this turn, minus tokens, index, request).  ``sent`` maps a request
    that is out to the tokens it left with.  ``key`` is the one under which the group stands in the queue of
    groups, None where it does not stand.
    """

    context: GroupContext
    lengths: GroupPosterior
    seen: SeenEnds
    heap: list[tuple[int, int, int, Request]] = attrs.Factory(list)
    sent: dict[Request, int] = attrs.Factory(dict)
    key: float | None = None


class LongestPlausible(Prioritizer):
    """Serves the request that may plausibly run longest from now on; O(log n) per decision.

    A request's remainder is its plausible length (see ``GroupPosterior``), at most ``max_tokens``, less what
    it has generated.  So groups without a finished response take turns, fewest tokens first, and groups that
    have shown to be short wait.  A turn lasts ``turn_tokens``: until it has generated so many, a request
    keeps its place.  None gives every chunk a turn where instances share KV, and elsewhere, where a turn
    begins with a prefill, a ``TURNS``-th of ``max_tokens``.  In a batch nothing starves, because a running
    request comes nearer to its end.

    Heaps hold stale entries, which are dropped when they surface, or when they outnumber the others.  The end
    of a response looks at its siblings in flight.
    """

    def __init__(self, surprise: float, turn_tokens: int | None = 1) -> None:
        self.surprise = surprise
        self.turn_tokens = turn_tokens
        self._shapes = Shapes()
        self._waiting: set[Request] = set()
        self._groups: dict[int, WaitingGroup] = {}
        self._families: WeakValueDictionary[str, SeenEnds] = WeakValueDictionary()
        self._queue: list[tuple[float, int]] = []
        self._shares_kv = True

    def instance_started(self, instance: InstanceStatus) -> None:
        """Note whether it shares KV; turns are as long as on the last."""
        self._shares_kv = instance.info.fetch_s_per_token is not None

    def push(self, request: Request) -> None:
        """Take a waiting request, and learn what it has generated since it was sent."""
        self._waiting.add(request)
        group = self._groups.get(request.group.seq)
        if group is None:
            group = self._groups[request.group.seq] = self._met(request.group)
        generated = request.generated_tokens
        group.lengths.grow(group.sent.pop(request, 0), generated)  # an earlier process may have begun it
        turn = self.turn_tokens or (1 if self._shares_kv else max(1, group.context.max_tokens // TURNS))
        before = generated - generated % turn
        heappush(group.heap, (before, -generated, request.index, request))
        self._enter(group)

    def peek(self) -> Request | None:
        """Return the request to serve next."""
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
        self._waiting.remove(request)
        group = self._groups[request.group.seq]
        group.sent[request] = request.generated_tokens
        self._enter(group)

    def group_changed(self, group: GroupContext, request: Request) -> None:
        """Learn the length of the response that is over; forget the group with the last.

        One that was cut off, by its limit or an abort, says only that it would have been longer.
        """
        known = self._groups[group.seq]
        ended = group.finished > known.seen.finished
        known.seen.finished = group.finished
        if request in known.sent:
            tokens = request.generated_tokens
            known.lengths.grow(known.sent.pop(request), tokens, ended and 0 < tokens < group.max_tokens)
        if group.left == 0:
            del self._groups[group.seq]
        else:
            self._enter(known)

    def __len__(self) -> int:
        return len(self._waiting)

    def _met(self, context: GroupContext) -> WaitingGroup:
        """Return what is kept of a group from its first request on."""
        seen = self._families.get(context.family)
        if seen is None:
            seen = SeenEnds(context.finished)
            if context.family:
                self._families[context.family] = seen
        return WaitingGroup(context, GroupPosterior(self._shapes), seen)

    def _enter(self, group: WaitingGroup) -> None:
        """Stand in the queue of groups under the present key, or not at all if nothing waits."""
        heap, waiting = group.heap, self._waiting
        while heap and (heap[0][3] not in waiting or -heap[0][1] != heap[0][3].generated_tokens):
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

    def _remainder(self, group: WaitingGroup, before: int) -> float:
        """Return how many tokens a request of the group may plausibly have had left when its turn began."""
        plausible = group.lengths.plausible_tokens(before, self.surprise)
        return min(group.context.max_tokens, plausible) - before
