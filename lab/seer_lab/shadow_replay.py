"""Servers as a shadow sees them: requests in the order in which they came, as far as there is room for them.

A server runs what its KV and its limit of requests allow.  The requests of a group share the KV of their
prompt, as with prefix caching.  Where KV runs short a server preempts the request that it took last, as vLLM
does, and computes its context again later.  A step takes so long, so much more for each request in it, and
for each token of their contexts; so does each token of a prompt before it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

import attrs
import msgspec
import numpy as np
from seer_host.shadow_records import WatchedRequest

__all__ = ["ReplayedServer", "ServerLimits", "StepCosts", "fit_costs", "replayed", "replayed_s"]

ROUNDS = 6
"""Of replays, each by the costs that fit the one before."""

HALF_BLOCK = 8
"""Tokens of KV: engines' blocks have 16."""

Counts = tuple[float, float, float, float]
"""Steps; requests, and tokens of their contexts, summed over steps; tokens of prompts that were computed."""


class StepCosts(msgspec.Struct, frozen=True):
    """The time of a server's step, and of a prompt's token before it."""

    step_s: float
    request_s: float = 0.0
    """More for each request of the step."""
    context_s: float = 0.0
    """More for each token of their contexts."""
    prompt_s: float = 0.0

    def of(self, counts: Counts) -> float:
        """Return how long so many steps take together."""
        steps, requests, contexts, prompts = counts
        decoding = self.step_s * steps + self.request_s * requests + self.context_s * contexts
        return decoding + self.prompt_s * prompts


class ServerLimits(msgspec.Struct, frozen=True):
    """The room of a server."""

    max_running: int = 256
    kv_tokens: int = 0
    """0 is no limit."""


@attrs.define(eq=False)
class _Running:
    number: int
    group: str
    context: int
    left: int


class ReplayedServer:
    """The requests of one server; ``ends`` has the counts and the time of each one's end."""

    def __init__(
        self,
        requests: Sequence[WatchedRequest],
        numbers: Sequence[int],
        costs: StepCosts,
        limits: ServerLimits,
    ) -> None:
        self._requests, self._costs, self._limits = requests, costs, limits
        self._coming = deque(sorted(numbers, key=lambda number: requests[number].began_s))
        self._waiting: deque[_Running] = deque()
        self._running: list[_Running] = []
        self._used = self._contexts = 0
        self._members: Counter[str] = Counter()
        """The running requests of each group."""
        self._prompts: dict[str, int] = {}
        """The tokens that a group's prompts have in common: of later turns, those of the first."""
        for number in numbers:
            its = requests[number]
            most = self._prompts.get(its.group, its.prompt_tokens)
            self._prompts[its.group] = max(0, min(most, its.prompt_tokens - 1))
        self.now_s = self.idle_s = 0.0
        """Since the first request came, and how much of it there was none."""
        self.began_s = requests[self._coming[0]].began_s
        self._counts: Counts = 0.0, 0.0, 0.0, 0.0
        self.ends: dict[int, tuple[Counts, float]] = {}

    def run(self) -> None:
        """Serve all."""
        while self._coming or self._waiting or self._running:
            self._arrive()
            self._admit()
            if self._running:
                self._steps()
            elif self._coming:
                until_s = self._arrival_s
                self.idle_s += until_s - self.now_s
                self.now_s = until_s

    @property
    def _filled(self) -> int:
        """The tokens of KV that are taken: the last block of each request is half full in the mean."""
        return self._used + HALF_BLOCK * len(self._running)

    @property
    def _arrival_s(self) -> float:
        return self._requests[self._coming[0]].began_s - self.began_s

    def _arrive(self) -> None:
        while self._coming and self._arrival_s <= self.now_s + 1e-9:
            number = self._coming.popleft()
            its = self._requests[number]
            self._waiting.append(_Running(number, its.group, max(1, its.prompt_tokens), its.tokens))

    def _admit(self) -> None:
        most, room = self._limits.max_running, self._limits.kv_tokens
        while self._waiting and len(self._running) < most:
            first = self._waiting[0]
            new = self._own(first)
            if room and self._running and self._filled + new + HALF_BLOCK > room:
                return
            self._running.append(self._waiting.popleft())
            self._members[first.group] += 1
            self._used += new
            self._contexts += first.context
            self._count((0.0, 0.0, 0.0, float(new)))

    def _steps(self) -> None:
        """Run steps until something changes."""
        running, room = self._running, self._limits.kv_tokens
        while room and len(running) > 1 and self._filled + len(running) > room:
            last = running[-1]  # it comes back before those that wait
            self._leave(last)
            self._waiting.appendleft(last)
        count, contexts = len(running), self._contexts
        steps = min(each.left for each in running)
        if room:
            steps = max(1, min(steps, (room - self._filled) // count))
        if self._coming:
            step_s = self._costs.of((1.0, float(count), float(contexts), 0.0))
            if step_s > 0:
                steps = max(1, min(steps, int((self._arrival_s - self.now_s) / step_s) + 1))
        grown = contexts * steps + count * steps * (steps - 1) / 2
        self._count((float(steps), float(count * steps), grown, 0.0))
        for each in running:
            each.context += steps
            each.left -= steps
        self._used += steps * count
        self._contexts += steps * count
        for each in [each for each in running if not each.left]:
            self._leave(each)
            self.ends[each.number] = self._counts, self.now_s

    def _own(self, request: _Running) -> int:
        """Return the tokens of KV that a request has for itself, without a prompt that its group holds."""
        return request.context - (self._prompts[request.group] if self._members[request.group] else 0)

    def _leave(self, request: _Running) -> None:
        self._running.remove(request)
        self._members[request.group] -= 1
        self._used -= self._own(request)
        self._contexts -= request.context

    def _count(self, more: Counts) -> None:
        steps, requests, contexts, prompts = self._counts
        self._counts = steps + more[0], requests + more[1], contexts + more[2], prompts + more[3]
        self.now_s += self._costs.of(more)


def replayed(
    requests: Sequence[WatchedRequest], costs: StepCosts, limits: ServerLimits
) -> list[ReplayedServer]:
    """Return the servers of some requests, each with the ends of its own."""
    servers: dict[str, list[int]] = {}
    for number, each in enumerate(requests):
        servers.setdefault(each.server, []).append(number)
    found = [ReplayedServer(requests, numbers, costs, limits) for numbers in servers.values()]
    for server in found:
        server.run()
    return found


def replayed_s(requests: Sequence[WatchedRequest], costs: StepCosts, limits: ServerLimits) -> float:
    """Return how long requests take on their servers as they came, under these costs."""
    start_s = min(each.began_s for each in requests)
    return max(each.began_s - start_s + each.now_s for each in replayed(requests, costs, limits))


def fit_costs(requests: Sequence[WatchedRequest], limits: ServerLimits) -> StepCosts:
    """Return the costs under which a replay ends requests when they ended, by least squares of seconds.

    Steps that are apart, such as those of a trainer, are apart in time too, or on servers of other names.
    """
    from scipy.optimize import nnls  # a third of a second

    longest = max(requests, key=lambda each: each.tokens)
    costs = StepCosts((longest.ended_s - longest.began_s) / longest.tokens)
    for _ in range(ROUNDS):
        rows, times = [], []
        for server in replayed(requests, costs, limits):
            for number, (counts, _) in server.ends.items():
                rows.append(counts)
                times.append(max(1e-9, requests[number].ended_s - server.began_s - server.idle_s))
        matrix, took = np.array(rows), np.array(times)
        matrix[:, 3] += matrix[:, 1]  # positions: a request has one too, and it costs no less
        scale = np.maximum(matrix.max(axis=0), 1e-12)
        found, _ = nnls(matrix / scale, took)
        step_s, request_s, context_s, position_s = (float(each) for each in found / scale)
        costs = StepCosts(step_s, request_s + position_s, context_s, position_s)
    return costs
