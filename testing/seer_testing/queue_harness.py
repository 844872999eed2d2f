"""A rollout by hand: a test plays the events of a prioritizer, request by request."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis.strategies import DataObject

from seer_core.model import GroupContext, Request, RequestState
from seer_core.ports.contracts import implemented
from seer_core.ports.policy import Prioritizer
from seer_testing.harness import guarded

__all__ = ["QueueHarness"]

PROMPT_TOKENS = 10


class QueueHarness:
    """Groups whose requests wait, run and finish when a test says so; no scheduler, no engine.

    Drives one prioritizer, or several that must agree, such as a fast one and a plain reference.  ``running``
    and ``waiting`` are requests, in the order in which they began to.  A queue of a wrong length, or one that
    offers what does not wait, fails the test; one that changes what it is given raises ``PluginError``.
    """

    def __init__(self, *queues: Prioritizer, max_tokens: int) -> None:
        self.queues = [guarded("prioritizer", queue) for queue in queues]
        self.max_tokens = max_tokens
        self.groups = 0
        self.requests = 0
        self.families: dict[str, list[GroupContext]] = {}
        self.running: list[Request] = []
        self.waiting: list[Request] = []

    def add(self, size: int, max_tokens: int | None = None, family: str = "") -> GroupContext:
        """Let the requests of one more group wait, of a family if one is named; return the group."""
        longest = self.max_tokens if max_tokens is None else max_tokens
        lengths = tuple(5 + 11 * index % 45 for index in range(size))
        group = GroupContext(
            f"g{self.groups}",
            self.groups,
            size,
            PROMPT_TOKENS,
            longest,
            lengths,
            left=size,
            first_seq=self.requests,
            family=family,
        )
        if family:
            siblings = self.families.setdefault(family, [group])
            group.finished, group.informed = siblings[0].finished, siblings[0].finished > 0
            group.longest_finished_tokens = siblings[0].longest_finished_tokens
            siblings.append(group)
        self.groups += 1
        for index in range(size):
            self.push(Request(group, index))
            self.requests += 1
        return group

    def push(self, request: Request) -> None:
        """Let a request wait."""
        request.state = RequestState.WAITING
        self.waiting.append(request)
        for queue in self.queues:
            queue.push(request)
        self._check_lengths()

    def take(self, request: Request) -> None:
        """Remove a waiting request, which need not be the next, as for a chunk."""
        self.waiting.remove(request)
        for queue in self.queues:
            queue.take(request)
        request.state = RequestState.RUNNING
        self._check_lengths()

    def serve(self) -> Request | None:
        """Let what is next run, and return it; None if nothing waits."""
        offers = [queue.peek() for queue in self.queues]
        assert len(set(offers)) == 1, f"the queues disagree: {offers}"
        offered = offers[0]
        if offered is not None:
            assert isinstance(offered, Request), f"offered {offered!r}, which is no request"
            assert offered in self.waiting, f"offered {offered.id!r}, which does not wait"
            self.take(offered)
            self.running.append(offered)
        return offered

    def come_back(self, request: Request, tokens: int) -> None:
        """Let a running request wait again, after so many tokens more."""
        self.running.remove(request)
        request.generated_tokens += tokens
        self.push(request)

    def end(self, request: Request, tokens: int) -> None:
        """Let a running request's response be over, after so many tokens more; its group counts it."""
        self.running.remove(request)
        request.generated_tokens += tokens
        tokens = request.generated_tokens
        for group in dict.fromkeys([request.group, *self.families.get(request.group.family, ())]):
            group.finished += 1
            group.longest_finished_tokens = max(group.longest_finished_tokens, tokens)
        self._over(request)

    def abort(self, request: Request) -> None:
        """End a request, whether it waits or runs; its group does not count it."""
        if request in self.running:
            self.running.remove(request)
        else:
            self.take(request)
        self._over(request)

    def drain(self) -> list[Request]:
        """Serve until nothing is offered, each request to its end; all that wait have to be served."""
        served = []
        while (request := self.serve()) is not None:
            self.end(request, 0)
            served.append(request)
        assert not self.waiting, f"offers none while {', '.join(each.id for each in self.waiting)} wait"
        return served

    def play(self, data: DataObject) -> None:
        """Play a random rollout to its end; the queues must agree, hold what waits, and lose no request.

        ``data`` draws: it is what ``hypothesis.strategies.data()`` gives.
        """
        draw = data.draw
        for _ in range(draw(st.integers(5, 60))):
            steps = ["add", "serve", "serve", "peek"]
            if self.running:
                steps += ["come back", "come back", "give back", "end", "end", "abort running"]
            if self.waiting:
                steps.append("abort waiting")
            match step := draw(st.sampled_from(steps)):
                case "add":
                    longest = draw(st.sampled_from([5, 20, self.max_tokens]))
                    self.add(draw(st.integers(1, 4)), longest, draw(st.sampled_from(["", "", "f", "h"])))
                case "serve":
                    self.serve()
                case "peek":
                    assert len({queue.peek() for queue in self.queues for _ in range(2)}) == 1
                case "come back" | "give back":
                    request = draw(st.sampled_from(self.running))
                    self.come_back(request, draw(st.integers(1, 9)) if step == "come back" else 0)
                case "end":
                    self.end(draw(st.sampled_from(self.running)), draw(st.integers(0, 9)))
                case _:
                    self.abort(draw(st.sampled_from(getattr(self, step.removeprefix("abort ")))))
        self.drain()

    def _over(self, request: Request) -> None:
        request.state = RequestState.FINISHED
        request.group.left -= 1
        for queue in self.queues:
            if (group_changed := implemented(queue, "group_changed")) is not None:
                group_changed(request.group, request)

    def _check_lengths(self) -> None:
        for length in map(len, self.queues):
            assert length == len(self.waiting), f"has length {length} when {len(self.waiting)} wait"
