"""Progress: what a rollout has done, is doing and may still need, from its events alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import attrs

from seer_core.events import (
    ChunkFinished,
    Command,
    Complete,
    Event,
    GroupsSubmitted,
    InstanceLost,
    InstanceReported,
    InstanceStarted,
)

__all__ = ["InstanceLine", "Progress"]

WINDOW_S = 20.0
"""Tokens per second are averaged over this long."""


@attrs.define(eq=False)
class InstanceLine:
    """One instance in the display."""

    id: str
    alive: bool = True
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    stepping_s: float = 0.0
    drafting_s: float = 0.0


class Progress:
    """Observer that counts."""

    def __init__(self) -> None:
        self.now = 0.0
        self.started_s: float | None = None
        self.groups = 0
        self.groups_done = 0
        self.requests = 0
        self.requests_done = 0
        self.tokens = 0
        self.finished_tokens = 0
        self.steps = 0
        self.drafted = 0
        self.accepted = 0
        self.instances: dict[str, InstanceLine] = {}
        self._left: dict[str, int] = {}
        self._generated: dict[str, int] = {}
        self._recent: deque[tuple[float, int]] = deque()

    def observe(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        """Count what happened and what was decided."""
        self.now = now
        match event:
            case GroupsSubmitted():
                self.started_s = now
                self.groups += len(event.groups)
                self.requests += sum(group.n for group in event.groups)
                self._left |= {group.id: group.n for group in event.groups}
            case InstanceStarted():
                self.instances[event.info.id] = InstanceLine(event.info.id)
            case InstanceLost():
                self.instances[event.instance_id] = InstanceLine(event.instance_id, alive=False)
            case InstanceReported():
                line = self.instances[event.instance_id]
                line.running, line.waiting, line.kv_usage = event.running, event.waiting, event.kv_usage
                line.stepping_s, line.drafting_s = event.stepping_s, event.drafting_s
            case ChunkFinished():
                self._finished(now, event)
        for command in commands:
            if isinstance(command, Complete):
                self._completed(command.request_id)

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
        """Estimate of the time left: missing tokens over the mean rate so far; None too early.

        An unfinished response is taken to become as long as the mean finished one, or a tenth longer
        than it is already.
        """
        if not self.requests_done or self.started_s is None or not self.tokens:
            return None
        mean = self.finished_tokens / self.requests_done
        unfinished = self.requests - self.requests_done
        started = self._generated.values()
        missing = sum(max(mean - tokens, tokens / 10) for tokens in started)
        missing += (unfinished - len(started)) * mean
        return missing * (self.now - self.started_s) / self.tokens

    @property
    def acceptance_length(self) -> float | None:
        """Tokens per request and step so far; None while nothing was drafted."""
        return 1 + self.accepted / self.steps if self.drafted else None

    def _finished(self, now: float, event: ChunkFinished) -> None:
        self.tokens += event.tokens
        self.steps += event.steps
        self.drafted += event.drafted
        self.accepted += event.accepted
        self._recent.append((now, event.tokens))
        self._generated[event.request_id] = self._generated.get(event.request_id, 0) + event.tokens

    def _completed(self, request_id: str) -> None:
        self.finished_tokens += self._generated.pop(request_id, 0)
        self.requests_done += 1
        group_id = request_id.rpartition("/")[0]
        self._left[group_id] -= 1
        self.groups_done += self._left[group_id] == 0
