"""The prioritizer: the paper's Algorithm 2; the scheduler itself guards against starvation."""

from __future__ import annotations

from collections import deque
from heapq import heapify, heappop, heappush

import attrs

from seer_core.model import GroupContext, Request, RequestState
from seer_core.ports.policy import Prioritizer

__all__ = ["ContextAware"]

WAITING = RequestState.WAITING
"""The state by itself: reading one off its Enum costs 0.1 us in Python 3.11."""


@attrs.define(eq=False, weakref_slot=False)
class Candidates:
    """A group's waiting requests, its probe excepted; furthest first, for their KV may still be warm.

    ``fresh`` are those without a token, by arrival; ``begun`` is a heap of the others, and of those that were
    given back without one, once there are any.  ``estimate`` is the key under which the group is in the heap
    of estimates, None where it is not.
    """

    group: GroupContext
    fresh: list[Request] = attrs.Factory(list)
    begun: list[tuple[int, int, Request]] | None = None
    estimate: int | None = None


class ContextAware(Prioritizer):
    """Serves probes shortest first, then groups longest first; O(log n) per decision.

    Response 0 of each group is its probe.  While probes wait, the one with the fewest generated
    tokens is next; otherwise a request of the group with the largest estimate.  Requests without a token,
    which are most of a long queue, are listed as they arrive; the others are in heaps.  Both hold stale
    entries, which are dropped when they surface, or when a group is over and they outnumber the others.
    """

    def __init__(self) -> None:
        self._fresh_probes: deque[Request] = deque()
        self._begun_probes: list[tuple[int, int, Request]] = []
        self._groups: dict[int, Candidates] = {}
        self._families: dict[str, dict[int, Candidates]] = {}
        """Of each family the groups among them: one's response changes the estimate of all."""
        self._longest: list[tuple[int, int, Candidates]] = []
        self._waiting = 0

    def push(self, request: Request) -> None:
        """Queue a waiting request: a probe with the probes, another with its group."""
        self._waiting += 1
        tokens, index, context = request.generated_tokens, request.index, request.group
        if not index and not context.informed:
            probes = self._fresh_probes
            if not tokens and (not probes or probes[-1].group.seq < context.seq):
                probes.append(request)
            else:
                heappush(self._begun_probes, (tokens, context.seq, request))
            return
        group = self._groups.get(context.seq)
        if group is None:
            group = self._groups[context.seq] = Candidates(context)
            if context.family:
                self._families.setdefault(context.family, {})[context.seq] = group
        fresh = group.fresh
        if not tokens and (not fresh or fresh[-1].index < index):
            fresh.append(request)
        else:
            if group.begun is None:
                group.begun = []
            heappush(group.begun, (-tokens, index, request))
        if group.estimate != context.estimate_tokens:
            self._enter(group)

    def peek(self) -> Request | None:
        """Return the request to serve next."""
        if self._fresh_probes or self._begun_probes:
            probe = self._probe()
            if probe is not None:
                return probe
        longest = self._longest
        while longest:
            negative_estimate, _, group = longest[0]
            if group.estimate == -negative_estimate:
                request = self._head(group)
                if request is not None:
                    return request
                group.estimate = None
            heappop(longest)
        return None

    def take(self, request: Request) -> None:
        """Remove a waiting request: its entry is stale once it does not wait."""
        self._waiting -= 1
        if request.generated_tokens and (request.index or request.group.informed):
            begun = self._groups[request.group.seq].begun
            if begun and begun[0][2] is request:  # or it would lie below when the request comes back, further
                heappop(begun)

    def group_changed(self, group: GroupContext, request: Request) -> None:
        """Move the group, and those of its family, to their new estimate; forget it when it is over."""
        candidates = self._groups.get(group.seq)
        siblings = self._families.get(group.family)
        if group.left == 0:
            if candidates is not None:
                candidates.estimate = None
                del self._groups[group.seq]
                if siblings is not None:
                    del siblings[group.seq]
                    if not siblings:
                        del self._families[group.family]
            self._compact()
            candidates = None
        changed = siblings.values() if siblings is not None else () if candidates is None else (candidates,)
        for each in changed:
            if each.estimate != each.group.estimate_tokens and self._head(each) is not None:
                self._enter(each)

    def __len__(self) -> int:
        return self._waiting

    def _enter(self, group: Candidates) -> None:
        """Put a group with a waiting request into the heap of estimates, under the present one."""
        context = group.group
        estimate = context.estimate_tokens
        if group.estimate != estimate:
            group.estimate = estimate
            heappush(self._longest, (-estimate, context.seq, group))

    @staticmethod
    def _head(group: Candidates) -> Request | None:
        """Return a group's furthest request, or None if none waits."""
        begun, fresh = group.begun, group.fresh
        while begun:
            negative_tokens, _, request = begun[0]
            if request.state is WAITING and request.generated_tokens == -negative_tokens:
                if negative_tokens:
                    return request
                break
            heappop(begun)
        while fresh and (fresh[0].state is not WAITING or fresh[0].generated_tokens):
            del fresh[0]
        if begun and not (fresh and fresh[0].index < begun[0][1]):
            return begun[0][2]
        return fresh[0] if fresh else None

    def _probe(self) -> Request | None:
        """Return the probe with the fewest tokens, or None if none waits."""
        begun, fresh = self._begun_probes, self._fresh_probes
        while fresh and (fresh[0].state is not WAITING or fresh[0].generated_tokens):
            fresh.popleft()
        while begun:
            tokens, seq, request = begun[0]
            if fresh and (tokens or seq > fresh[0].group.seq):
                break
            if request.state is WAITING and request.generated_tokens == tokens:
                return request
            heappop(begun)
        return fresh[0] if fresh else None

    def _compact(self) -> None:
        """Drop stale entries where they are most: a group may be over long before its own surface."""
        groups = self._groups
        if len(self._longest) > 64 + 2 * len(groups):
            self._longest = [
                (-group.estimate, seq, group) for seq, group in groups.items() if group.estimate is not None
            ]
            heapify(self._longest)
        if len(self._begun_probes) + len(self._fresh_probes) > 64 + 2 * self._waiting:
            self._begun_probes = [entry for entry in self._begun_probes if entry[2].state is WAITING]
            heapify(self._begun_probes)
            self._fresh_probes = deque(each for each in self._fresh_probes if each.state is WAITING)
