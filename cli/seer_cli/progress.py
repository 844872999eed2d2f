"""Progress: the work of a rollout that is done, under way, waiting and left, from its events alone."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence

import attrs
from seer_session.results import tail_requests
from seer_trace.chunk_runs import Cause, ChunkFollower, ChunkRun, InstanceLoad, group_of

from seer_core.model import WHOLE
from seer_core.model.events import (
    ChunkFinished,
    Command,
    Complete,
    Dispatch,
    EnvironmentAnswered,
    Event,
    GroupSpec,
    GroupsSubmitted,
    InstanceDegraded,
    InstanceFailed,
    InstanceLost,
    InstanceReported,
    InstanceStarted,
    InstanceStopped,
    InstanceWaiting,
)
from seer_core.ports.policy import Observer

__all__ = ["InstanceLine", "RunProgress", "Tail"]

WINDOW_S = 20.0
"""Tokens per second are averaged over this long."""

PACE_SHARE = 0.1
"""Weight of the latest chunk in the pace at which one response is written."""

EULER_GAMMA = 0.5772


@attrs.define(eq=False)
class InstanceLine:
    """One instance in the display."""

    id: str
    node: str = ""
    place: InstanceLoad | None = None
    """Its limits and what it has been sent; None while it is down."""
    failed: bool = False
    missing: str = ""
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    stepping_s: float = 0.0
    drafting_s: float = 0.0

    @property
    def alive(self) -> bool:
        """Whether it is up."""
        return self.place is not None

    @property
    def max_running(self) -> int:
        """The most requests that it runs at a time; 0 while it is down."""
        return 0 if self.place is None else self.place.info.max_running

    @property
    def kv_reserved(self) -> float:
        """The share of its KV that is reserved for the chunks in flight."""
        if self.place is None or not self.place.info.kv_capacity_tokens:
            return 0.0
        return self.place.reserved_tokens / self.place.info.kv_capacity_tokens


@attrs.frozen
class Tail:
    """The last tenth of the responses, while they are under way."""

    left: int
    """How many are not over."""
    requests: int
    """How many responses the run has in all."""
    for_s: float
    """How long the tail has lasted, in seconds on the run's clock."""
    longest_id: str
    """The request of the longest of them so far."""
    longest_tokens: int
    """The tokens that it has; those of its present chunk are estimated."""


class RunProgress(Observer):
    """Observer that counts; figures that take more than a sum are computed where they are read."""

    def __init__(self) -> None:
        self.now = 0.0
        self.started_s: float | None = None
        self.groups = 0
        self.groups_done = 0
        self.requests = 0
        self.requests_done = 0
        self._whole = 0
        """How many of them ended by themselves or at their limit."""
        self.tokens = 0
        self._resumed_tokens = 0
        self.steps = 0
        self.drafted = 0
        self.accepted = 0
        self.degradations = 0
        self.instances: dict[str, InstanceLine] = {}
        self._follower = ChunkFollower()
        self._left: dict[str, int] = {}
        self._specs: dict[str, GroupSpec] = {}
        self._unbegun: dict[str, int] = {}
        """How many requests of each group have not been sent anywhere."""
        self._generated: dict[str, int] = {}
        """The tokens of each response that has begun and is not over."""
        self._reserves = 0
        """The tokens of the chunk sent last that KV was reserved for, beside its context."""
        self._tail_since_s: float | None = None
        self._recent: deque[tuple[float, int]] = deque()
        self._pace = 0.0

    def observe(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        """Count what happened and what was decided."""
        self.now = now
        over = self._follower.read(now, event, commands)
        match event:
            case ChunkFinished():  # first, for most events are: each case is a check of its own
                self._finished(now, event, over)
            case GroupsSubmitted():
                if self.requests == self.requests_done:
                    self.started_s = now
                for group in event.groups:
                    self._submitted(group)
                self._note_tail()
            case EnvironmentAnswered(request_id, tokens):
                if request_id in self._generated:
                    self._generated[request_id] += tokens
            case InstanceStarted(info):
                self.instances[info.id] = InstanceLine(info.id, info.node, self._follower.places[info.id])
            case InstanceLost():
                self._down(event.instance_id)
            case InstanceFailed():
                self._down(event.instance_id).failed = True
            case InstanceWaiting():
                self._down(event.instance_id).missing = event.missing
            case InstanceStopped():
                self.instances.pop(event.instance_id, None)
            case InstanceDegraded():
                self.degradations += 1
            case InstanceReported():
                line = self.instances[event.instance_id]
                line.running, line.waiting, line.kv_usage = event.running, event.waiting, event.kv_usage
                line.stepping_s, line.drafting_s = event.stepping_s, event.drafting_s
        for command in commands:
            if isinstance(command, Complete):
                self._whole += command.finish_reason in WHOLE
                self._completed(command.request_id)
            elif isinstance(command, Dispatch):
                if command.request_id not in self._generated:
                    self._generated[command.request_id] = 0
                    self._unbegun[group_of(command.request_id)] -= 1
                reserved = command.reserved_tokens
                self._reserves = command.max_tokens if reserved is None else reserved

    @property
    def tokens_per_s(self) -> float:
        """Tokens of the chunks that finished lately, per second."""
        if self.started_s is None or self.now <= self.started_s:
            return 0.0
        while self._recent and self._recent[0][0] < self.now - WINDOW_S:
            self._recent.popleft()
        span = min(WINDOW_S, self.now - self.started_s)
        return sum(tokens for _, tokens in self._recent) / span

    @property
    def left_s(self) -> float | None:
        """Estimate of the time left; None too early.

        A response is taken to end at random, at any token alike, or at its limit.  Then all missing tokens
        come at the mean rate so far; but the last responses run alone, each at its own pace, so it cannot
        take less than the longest of those under way.
        """
        if not self._whole or self.started_s is None or not self.tokens:
            return None
        tokens = self.tokens + self._resumed_tokens
        mean = tokens / self._whole  # of a Geometric variable, those included that are not over or were cut
        specs = self._specs
        rooms = [specs[group_of(name)].max_tokens - tokens for name, tokens in self._written()]
        missing = sum(min(mean, room) for room in rooms)
        missing += sum(count * min(mean, specs[group].max_tokens) for group, count in self._unbegun.items())
        together = missing * (self.now - self.started_s) / self.tokens
        count = self._follower.running
        if not count or not self._pace:
            return together
        # The expected maximum of so many memoryless lengths: the mean times the harmonic number.
        longest = mean * (math.log(count) + EULER_GAMMA + 1 / (2 * count))
        return max(together, min(longest, max(rooms)) / self._pace)

    @property
    def waiting(self) -> dict[Cause, int]:
        """How many requests wait for what.

        A request is taken to need its context and as much more as the chunk sent last had reserved.
        """
        acting = self._follower.acting
        count = self.requests - self.requests_done - self._follower.running - len(acting)
        others: dict[Cause, int] = {"environment": len(acting)} if acting else {}
        if count <= 0:
            return others
        lack = self._follower.lack()
        if not isinstance(lack, int):
            return {lack: count, **others}
        sent = {*self._sent(), *acting}
        begun = [name for name in self._generated if name not in sent]
        short = sum(self._need(group_of(name), self._generated[name]) > lack for name in begun)
        short += sum(unsent for group, unsent in self._unbegun.items() if self._need(group, 0) > lack)
        found: dict[Cause, int] = {"kv": short, "turn": count - short, **others}
        return {cause: number for cause, number in found.items() if number > 0}

    @property
    def tail(self) -> Tail | None:
        """The tail, once it has begun and until it is over."""
        left = self.requests - self.requests_done
        if self._tail_since_s is None or not left:
            return None
        longest, tokens = max(self._written(), key=lambda each: each[1], default=("", 0.0))
        return Tail(left, self.requests, self.now - self._tail_since_s, longest, round(tokens))

    @property
    def acceptance_length(self) -> float | None:
        """Tokens per request and step so far; None while nothing was drafted."""
        return 1 + self.accepted / self.steps if self.drafted else None

    def _submitted(self, group: GroupSpec) -> None:
        self.groups += 1
        self.requests += group.n
        self._left[group.id] = group.n
        self._specs[group.id] = group
        resumed = {f"{group.id}/{index}": each.tokens for index, each in enumerate(group.resumed)}
        begun = {name: tokens for name, tokens in resumed.items() if tokens}
        self._resumed_tokens += sum(begun.values())
        self._generated |= begun
        self._unbegun[group.id] = group.n - len(begun)

    def _down(self, name: str) -> InstanceLine:
        """Return the line of an instance that is down, which may never have been up."""
        line = self.instances.get(name)
        if line is None or line.alive:
            line = self.instances[name] = InstanceLine(name)
        return line

    def _sent(self) -> dict[str, float]:
        """Return when each chunk in flight was sent, by its request."""
        places = self._follower.places.values()
        return {name: begin_s for place in places for name, (begin_s, _, _) in place.sent.items()}

    def _need(self, group: str, tokens: int) -> int:
        """Return the KV that a request with so many tokens is taken to need for its next chunk."""
        spec = self._specs[group]
        return spec.prompt_tokens + tokens + min(self._reserves, spec.max_tokens - tokens)

    def _written(self) -> Iterator[tuple[str, float]]:
        """Yield the tokens of each response under way, by its pace since its chunk was sent."""
        sent = self._sent()
        for name, tokens in self._generated.items():
            begin_s = sent.get(name)
            if begin_s is None:
                yield name, tokens
            else:
                most = self._specs[group_of(name)].max_tokens
                yield name, min(most, tokens + (self.now - begin_s) * self._pace)

    def _finished(self, now: float, event: ChunkFinished, over: Sequence[ChunkRun]) -> None:
        self.tokens += event.tokens
        self.steps += event.steps
        self.drafted += event.drafted
        self.accepted += event.accepted
        self._generated[event.request_id] += event.tokens
        self._recent.append((now, event.tokens))
        span = now - over[0].begin_s if over else 0.0
        pace = event.tokens / span if span > 0 else 0.0
        if pace:
            self._pace += (pace - self._pace) * (PACE_SHARE if self._pace else 1.0)

    def _completed(self, request_id: str) -> None:
        group_id = group_of(request_id)
        if self._generated.pop(request_id, None) is None:
            self._unbegun[group_id] -= 1
        self.requests_done += 1
        self._left[group_id] -= 1
        if not self._left[group_id]:
            del self._left[group_id], self._specs[group_id], self._unbegun[group_id]
            self.groups_done += 1
        self._note_tail()

    def _note_tail(self) -> None:
        """Note when the tail begins; requests that come later may end it."""
        if self.requests - self.requests_done > tail_requests(self.requests):
            self._tail_since_s = None
        elif self._tail_since_s is None:
            self._tail_since_s = self.now
