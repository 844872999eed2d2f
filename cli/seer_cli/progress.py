"""Progress: what a rollout has done, is doing and may still need, from its events alone."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import attrs

from seer_core.model.events import (
    ChunkFinished,
    Command,
    Complete,
    Dispatch,
    Event,
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

__all__ = ["InstanceLine", "RunProgress"]

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
    alive: bool = True
    failed: bool = False
    missing: str = ""
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    stepping_s: float = 0.0
    drafting_s: float = 0.0


class RunProgress(Observer):
    """Observer that counts."""

    def __init__(self) -> None:
        self.now = 0.0
        self.started_s: float | None = None
        self.groups = 0
        self.groups_done = 0
        self.requests = 0
        self.requests_done = 0
        self.tokens = 0
        self.steps = 0
        self.drafted = 0
        self.accepted = 0
        self.degradations = 0
        self.instances: dict[str, InstanceLine] = {}
        self._left: dict[str, int] = {}
        self._limits: dict[str, int] = {}
        self._generated: dict[str, int] = {}
        self._sent: dict[str, float] = {}
        self._recent: deque[tuple[float, int]] = deque()
        self._pace = 0.0

    def observe(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        """Count what happened and what was decided."""
        self.now = now
        match event:
            case GroupsSubmitted():
                if self.requests == self.requests_done:
                    self.started_s = now
                self.groups += len(event.groups)
                self.requests += sum(group.n for group in event.groups)
                self._left |= {group.id: group.n for group in event.groups}
                self._limits |= {group.id: group.max_tokens for group in event.groups}
            case InstanceStarted():
                self.instances[event.info.id] = InstanceLine(event.info.id, event.info.node)
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
            case ChunkFinished():
                self._finished(now, event)
        for command in commands:
            if isinstance(command, Complete):
                self._completed(command.request_id)
            elif isinstance(command, Dispatch):
                self._sent[command.request_id] = now

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
        if not self.requests_done or self.started_s is None or not self.tokens:
            return None
        mean = self.tokens / self.requests_done  # of a Geometric variable, those not over yet included
        started = {name: self._room(name) for name in {*self._generated, *self._sent}}
        waiting = dict(self._left)
        for name in started:
            waiting[_group_of(name)] -= 1
        missing = sum(min(mean, room) for room in started.values())
        missing += sum(count * min(mean, self._limits[group]) for group, count in waiting.items())
        together = missing * (self.now - self.started_s) / self.tokens
        count = len(self._sent)
        if not count or not self._pace:
            return together
        # The expected maximum of so many memoryless lengths: the mean times the harmonic number.
        longest = mean * (math.log(count) + EULER_GAMMA + 1 / (2 * count))
        return max(together, min(longest, max(started.values())) / self._pace)

    def _down(self, name: str) -> InstanceLine:
        """Return the line of an instance that is down, which may never have been up."""
        line = self.instances.get(name)
        if line is None or line.alive:
            line = self.instances[name] = InstanceLine(name, alive=False)
        return line

    def _room(self, request_id: str) -> float:
        """Return how many tokens a request under way may still generate, by its pace since it was sent."""
        since = self.now - self._sent.get(request_id, self.now)
        tokens = self._generated.get(request_id, 0) + since * self._pace
        return max(0.0, self._limits[_group_of(request_id)] - tokens)

    @property
    def acceptance_length(self) -> float | None:
        """Tokens per request and step so far; None while nothing was drafted."""
        return 1 + self.accepted / self.steps if self.drafted else None

    def _finished(self, now: float, event: ChunkFinished) -> None:
        self.tokens += event.tokens
        self.steps += event.steps
        self.drafted += event.drafted
        self.accepted += event.accepted
        self._generated[event.request_id] = self._generated.get(event.request_id, 0) + event.tokens
        span = now - self._sent.pop(event.request_id, now)
        pace = event.tokens / span if span > 0 else 0.0
        self._recent.append((now, event.tokens))
        if pace:
            self._pace += (pace - self._pace) * (PACE_SHARE if self._pace else 1.0)

    def _completed(self, request_id: str) -> None:
        self._generated.pop(request_id, None)
        self._sent.pop(request_id, None)
        self.requests_done += 1
        group_id = _group_of(request_id)
        self._left[group_id] -= 1
        if not self._left[group_id]:
            del self._left[group_id], self._limits[group_id]
            self.groups_done += 1


def _group_of(request_id: str) -> str:
    return request_id.rpartition("/")[0]
