"""A rollout by hand: what a prioritizer is told, and offers, request by request."""

from __future__ import annotations

from seer_core.guard import guard
from seer_core.model import GroupContext, Request, RequestState
from seer_core.policy import Prioritizer
from seer_core.testing.rig import watched

__all__ = ["RolloutByHand"]

PROMPT_TOKENS = 10


class RolloutByHand:
    """Groups whose requests wait, run and finish when a test says so; no scheduler, no engine.

    Tells one prioritizer, or several that must agree, such as a fast one and a plain one that is known to be
    right.  ``running`` and ``waiting`` are requests, in the order in which they began to.  A queue that
    changes what it is given raises ``PluginError``.
    """

    def __init__(self, *queues: Prioritizer, max_tokens: int) -> None:
        self.queues = [watched("prioritizer", queue) for queue in queues]
        self.max_tokens = max_tokens
        self.groups = 0
        self.requests = 0
        self.running: list[Request] = []
        self.waiting: list[Request] = []

    def add(self, size: int, max_tokens: int | None = None) -> GroupContext:
        """Let the requests of one more group wait; return the group."""
        longest = self.max_tokens if max_tokens is None else max_tokens
        group = GroupContext(f"g{self.groups}", self.groups, size, PROMPT_TOKENS, longest, left=size)
        guard(group)
        self.groups += 1
        for index in range(size):
            request = Request(f"{group.id}/{index}", self.requests, index, group)
            guard(request)
            self.push(request)
            self.requests += 1
        return group

    def push(self, request: Request) -> None:
        """Let a request wait."""
        request.state = RequestState.WAITING
        self.waiting.append(request)
        for queue in self.queues:
            queue.push(request)

    def take(self, request: Request) -> None:
        """Remove a waiting request, whoever is next; it is nowhere then."""
        self.waiting.remove(request)
        for queue in self.queues:
            queue.take(request)

    def serve(self) -> Request | None:
        """Let what is next run, and return it; None if nothing waits."""
        offers = [queue.peek() for queue in self.queues]
        assert len(set(offers)) == 1, f"the queues disagree: {offers}"
        offered = offers[0]
        if offered is not None:
            self.take(offered)
            offered.state = RequestState.RUNNING
            self.running.append(offered)
        return offered

    def come_back(self, request: Request, tokens: int) -> None:
        """Let a running request wait again, after so many tokens more."""
        self.running.remove(request)
        request.generated_tokens += tokens
        self.push(request)

    def end(self, request: Request, tokens: int) -> None:
        """Let a running request's response be over, after so many tokens more; its group learns from it."""
        self.running.remove(request)
        request.generated_tokens += tokens
        group = request.group
        group.finished += 1
        group.longest_finished_tokens = max(group.longest_finished_tokens, request.generated_tokens)
        self._over(request)

    def abort(self, request: Request) -> None:
        """End a request, whether it waits or runs; its group learns nothing."""
        if request in self.running:
            self.running.remove(request)
        else:
            self.take(request)
        self._over(request)

    def _over(self, request: Request) -> None:
        request.state = RequestState.FINISHED
        request.group.left -= 1
        for queue in self.queues:
            queue.group_changed(request.group, request)
