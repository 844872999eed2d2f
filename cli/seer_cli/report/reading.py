"""Follows a trace, or a run while it goes on, and sums up what a report shows."""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Sequence
from itertools import islice
from statistics import median

import attrs
import numpy as np
from seer_trace.chunk_runs import Cause, ChunkFollower, ChunkRun
from seer_trace.records import TraceRecord
from seer_trace.request_life import RequestLife, Wait

from seer_cli.report.bins import TimeBins
from seer_cli.report.finished import FinishedChunks
from seer_cli.report.lanes import MOST_CHANGES, Change, InstanceLane
from seer_cli.report.waiting import WaitingTimes
from seer_core.model import WHOLE
from seer_core.model.events import (
    AskEnvironment,
    ChunkFinished,
    Command,
    Complete,
    Dispatch,
    EnvironmentAnswered,
    EnvironmentFailed,
    Event,
    GroupSpec,
    GroupsSubmitted,
    InstanceDegraded,
    InstanceLeaving,
    InstanceLimited,
    InstanceLost,
    InstanceReported,
    InstanceStarted,
    InstanceStopped,
    RequestsAborted,
    RolloutPaused,
    RolloutResumed,
)
from seer_core.ports.policy import Observer

__all__ = ["GroupStory", "ReadRequest", "RunReader"]

ACTED = -1
"""Stands among the waits of a request for a time in which its environment worked on its turn."""

MOST_CHUNKS = 10_000
"""Chunks that are kept one by one: those of the requests that finished last."""


@attrs.define(eq=False)
class GroupStory:
    """A group: its lengths, and when they came."""

    spec: GroupSpec
    submitted_s: float
    first_row: int
    tokens: array[int] = attrs.Factory(lambda: array("q"))
    """The length of each finished response, in order of their finish."""
    finishes_s: array[float] = attrs.Factory(lambda: array("d"))
    are_whole: bytearray = attrs.Factory(bytearray)
    """Whether each of them ended by itself or at its limit: a scheduler learns from no others."""
    unbegun: int = attrs.field(init=False)
    """The indices of the requests that were sent nowhere and are not over, a bit for each."""

    def __attrs_post_init__(self) -> None:
        self.unbegun = (1 << self.spec.n) - 1

    @property
    def unbegun_rows(self) -> list[int]:
        """The rows of those requests."""
        return [self.first_row + index for index in range(self.spec.n) if self.unbegun >> index & 1]

    @property
    def whole(self) -> list[tuple[float, int]]:
        """When each response that ended by itself or at its limit was done, in order, and its tokens."""
        ends = zip(self.finishes_s, self.tokens, self.are_whole, strict=True)
        return [(at_s, tokens) for at_s, tokens, is_whole in ends if is_whole]

    @property
    def estimates(self) -> list[tuple[float, int]]:
        """When such a response was done that is longer than all before it, in order, and its tokens."""
        found: list[tuple[float, int]] = []
        for at_s, tokens in self.whole:
            if not found or tokens > found[-1][1]:
                found.append((at_s, tokens))
        return found

    @property
    def longest(self) -> int:
        """The longest of the finished responses."""
        return max(self.tokens, default=0)

    @property
    def median(self) -> float:
        """The median length of the finished responses."""
        return median(self.tokens) if self.tokens else 0.0


@attrs.define(eq=False)
class ReadRequest:
    """A request that is under way, or one of the last to finish."""

    request_id: str
    row: int
    group: GroupStory
    waits_since_s: float | None
    tokens: int = 0
    unread: int = 0
    """Those of its environment's last answer that no chunk has read."""
    instance_id: str = ""
    """Where its last chunk ran that brought tokens."""
    siblings: int = 0
    """How many of its group had finished when its present chunk was sent."""
    spans: list[tuple[float, float, int] | tuple[ChunkRun, int]] = attrs.Factory(list)
    """Its waits, each with the KV that it needed, and its chunks, each with the lane it was in.

    ``ACTED`` stands in place of the KV where it acted.
    """
    finished_s: float | None = None
    finish_reason: str | None = None
    before_it: int = 0
    acts_since_s: float | None = None
    words: tuple[str, list[tuple[str, ...]], str] | None = None
    """Its life in words, once it has been shown."""


@attrs.define(eq=False)
class RunReader(Observer):
    """Sums a run up; times are in seconds since its first groups came."""

    start_s: float | None = None
    now: float = 0.0
    lanes: dict[str, InstanceLane] = attrs.Factory(dict)
    groups: list[GroupStory] = attrs.Factory(list)
    finishes_s: array[float] = attrs.Factory(lambda: array("d"))
    rans_s: array[float] = attrs.Factory(lambda: array("d"))
    """How long each request's chunks ran, by row."""
    waits: WaitingTimes = attrs.Factory(WaitingTimes)
    waiting: TimeBins = attrs.Factory(lambda: TimeBins(1))
    """How many requests wait."""
    finished: FinishedChunks = attrs.Factory(FinishedChunks)
    kept: deque[ReadRequest] = attrs.Factory(deque)
    reasons: Counter[str] = attrs.Factory(Counter)
    changes: list[Change] = attrs.Factory(list)
    """Pauses, and requests that were given up."""
    _follower: ChunkFollower = attrs.Factory(ChunkFollower)
    open_requests: int = 0
    """The requests that are not over."""
    carried: int = 0
    """The requests of groups that were open when it began as a ``successor``."""
    _open_groups: dict[str, GroupStory] = attrs.Factory(dict)
    _requests: dict[str, ReadRequest] = attrs.Factory(dict)
    """The requests that have begun and are not over."""
    _kept_chunks: int = 0
    _since_s: float = 0.0

    @property
    def requests(self) -> int:
        """All requests of all groups."""
        return len(self.rans_s)

    @property
    def total_s(self) -> float:
        """From the first groups to the last response that finished, or to now while some are under way."""
        return max(self.finishes_s, default=self.now) if not self.open_requests else self.now

    def observe(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        """Read an event as it happens."""
        self.read(TraceRecord(now, event, list(commands)))

    def read(self, record: TraceRecord) -> None:
        """Add a record of a trace."""
        event = record.event
        if self.start_s is None and isinstance(event, GroupsSubmitted):
            self.start_s = record.now
        now = self.now = 0.0 if self.start_s is None else record.now - self.start_s
        self._advance()
        if isinstance(event, InstanceReported) and not record.commands:  # which changes no load
            self._follower.now = record.now
            self._event(now, event)
            return
        follower = self._follower
        failed = isinstance(event, InstanceStarted) and event.info.id in follower.places
        over = follower.read(record.now, event, record.commands)
        if not isinstance(event, ChunkFinished):  # most are
            self._event(now, event)
        for chunk in over:
            self._over(chunk)
        if failed:
            self._drop_requests()
        for command in record.commands:
            match command:
                case Dispatch():
                    self._dispatched(command)
                case Complete(request_id, reason):
                    self._completed(request_id, reason)
                case AskEnvironment(request_id):
                    self._asked(request_id)
        if not follower.changed and not isinstance(event, RolloutPaused | RolloutResumed):
            return
        for name in follower.changed:
            self._load(name)
        self.waits.note(now, follower.lack())

    def successor(self) -> RunReader:
        """Return a reader for what comes next on the instances that are up, with open requests."""
        other, now = RunReader(), self._follower.now
        other._follower.paused = self._follower.paused
        for name, place in self._follower.places.items():
            other.read(TraceRecord(now, InstanceStarted(place.info), []))
            other._follower.places[name].leaving = place.leaving
            other.lanes[name].go_on(self.lanes[name])
        if self.open_requests:
            other._go_on(self)
        return other

    def _go_on(self, before: RunReader) -> None:
        """Take over the requests that are open, and their chunks, as if they had come now."""
        sent: list[Command] = [
            each for place in before._follower.places.values() for _, each, _ in place.sent.values()
        ]
        specs = tuple(group.spec for group in before._open_groups.values())
        self._follower.acting = dict.fromkeys(before._follower.acting, before._follower.now)
        self.read(TraceRecord(before._follower.now, GroupsSubmitted(specs), sent))
        self.open_requests, self.carried = before.open_requests, self.requests
        for name, old_request in before._requests.items():
            request = self._request(name)
            assert request is not None
            request.tokens, request.siblings = old_request.tokens, old_request.siblings
            request.unread = old_request.unread
            request.instance_id = old_request.instance_id
            if old_request.acts_since_s is not None:
                request.waits_since_s, request.acts_since_s = None, self.now
        for story in self.groups:
            old = before._open_groups[story.spec.id]
            story.unbegun = old.unbegun
            story.submitted_s = old.submitted_s - before.now
            story.tokens, story.are_whole = old.tokens[:], old.are_whole[:]
            story.finishes_s = array("d", [at_s - before.now for at_s in old.finishes_s])

    def life(self, request: ReadRequest) -> RequestLife:
        """Return the waits and chunks of a kept request; times are on the run's own clock."""
        start_s = self.start_s or 0.0
        parts: list[Wait | ChunkRun] = []
        for span in request.spans:
            if isinstance(span[0], ChunkRun):
                parts.append(span[0])
            else:
                begin_s, end_s, need = span
                acted: dict[Cause, float] = {"environment": end_s - begin_s}
                causes_s = acted if need == ACTED else self.waits.causes_s(begin_s, end_s, need)
                parts.append(Wait(begin_s + start_s, end_s + start_s, causes_s))
        finished_s = None if request.finished_s is None else request.finished_s + start_s
        group = request.group
        ends = zip(group.finishes_s, group.tokens, strict=True)
        done = [(done_s + start_s, tokens) for done_s, tokens in islice(ends, request.before_it)]
        return RequestLife(
            request.request_id,
            group.spec,
            group.submitted_s + start_s,
            parts,
            finished_s,
            request.finish_reason,
            done,
            siblings_whole=[each for each, is_whole in zip(done, group.are_whole, strict=False) if is_whole],
        )

    def _event(self, now: float, event: Event) -> None:
        match event:
            case GroupsSubmitted(groups):
                for spec in groups:
                    self._submitted(now, spec)
            case EnvironmentAnswered(request_id, tokens):
                self._answered(request_id, tokens)
            case EnvironmentFailed(request_id):
                self._answered(request_id, 0)
            case InstanceReported():
                lane = self.lanes.get(event.instance_id)
                if lane is not None:
                    lane.report(now, event)
            case InstanceStarted(info):
                lane = self.lanes.get(info.id)
                if lane is None:
                    lane = self.lanes[info.id] = InstanceLane(info.id)
                    lane.number = self.finished.add_lane(lane)
                lane.info = info
                if lane.up:
                    lane.note(now, "went on after the rollout had failed")
                    return
                lane.change(now, True, "started again" if lane.changes else "started")
                if info.exactness != "exact":
                    lane.note(now, f"samples no better than {info.exactness}")
                if info.quantization:
                    lane.note(now, f"log-probs are those of weights quantised by {info.quantization}")
            case InstanceLost(name, reason) if name in self.lanes:
                self.lanes[name].be_lost(now, reason)
            case InstanceStopped(name) if name in self.lanes:
                self.lanes[name].change(now, False, "ended")
            case InstanceLeaving(name, reason, by) if name in self.lanes:
                self.lanes[name].note(now, f"leaves: {reason}{_asked(by)}")
            case InstanceLimited(name, most, by) if name in self.lanes:
                self.lanes[name].note(now, f"takes at most {most} chunks at once{_asked(by)}")
            case InstanceDegraded(name, what, reason) if name in self.lanes:
                self.lanes[name].note(now, f"goes on without {what}: {reason}")
            case RolloutPaused(by):
                self._note(now, f"the rollout paused{_asked(by)}")
            case RolloutResumed(by):
                self._note(now, f"the rollout went on{_asked(by)}")
            case RequestsAborted(requests, by):
                more = f" and {len(requests) - 1} more" if len(requests) > 1 else ""
                self._note(now, f"{requests[0] if requests else 'nothing'}{more} given up{_asked(by)}")

    def _note(self, now: float, what: str) -> None:
        if len(self.changes) < MOST_CHANGES:
            self.changes.append(Change(now, what))

    def _submitted(self, now: float, spec: GroupSpec) -> None:
        group = GroupStory(spec, now, self.requests)
        self.groups.append(group)
        self._open_groups[spec.id] = group
        self.open_requests += spec.n
        self.rans_s.extend([0.0] * spec.n)

    def _request(self, request_id: str) -> ReadRequest | None:
        """Return a request that is not over; it has begun from now on."""
        found = self._requests.get(request_id)
        if found is not None:
            return found
        name, _, number = request_id.rpartition("/")
        group = self._open_groups.get(name)
        index = int(number) if number.isdecimal() else -1
        if group is None or index < 0 or not group.unbegun >> index & 1:
            return None
        group.unbegun &= ~(1 << index)
        resumed = group.spec.resumed[index].tokens if group.spec.resumed else 0
        row, since_s = group.first_row + index, group.submitted_s
        found = self._requests[request_id] = ReadRequest(request_id, row, group, since_s, resumed)
        return found

    def _dispatched(self, sent: Dispatch) -> None:
        request, lane = self._request(sent.request_id), self.lanes.get(sent.instance_id)
        if lane is not None:
            lane.slots.take(sent.request_id)
        if request is not None:
            self._end_wait(request, sent.kv_tokens)
            request.siblings = len(request.group.tokens)

    def _over(self, chunk: ChunkRun) -> None:
        lane = self.lanes[chunk.instance_id]
        slot = lane.slots.give_back(chunk.request_id)
        request = self._requests.get(chunk.request_id)
        if request is None:  # of a group that the trace lacks
            return
        request.spans.append((chunk, slot))
        request.waits_since_s = self.now
        self.rans_s[request.row] += chunk.end_s - chunk.begin_s
        result = chunk.result
        if result is None:
            lane.lose(chunk)
            return
        age, moved = request.tokens, request.instance_id not in ("", chunk.instance_id)
        known = 0 if not age else result.prefilled_tokens - request.unread
        self.finished.add(
            lane.number, chunk, result, self.start_s or 0.0, age, request.siblings, moved, max(0, known)
        )
        request.unread = 0
        request.instance_id = chunk.instance_id
        request.tokens = age + result.tokens

    def _completed(self, request_id: str, reason: str) -> None:
        request = self._request(request_id)
        if request is None:
            return
        del self._requests[request_id]
        self.open_requests -= 1
        group = request.group
        self._end_act(request)
        self._end_wait(request, group.spec.prompt_tokens)
        self.finishes_s.append(self.now)
        self.reasons[reason] += 1
        request.finished_s, request.finish_reason = self.now, reason
        request.before_it = len(group.tokens)
        group.tokens.append(request.tokens)
        group.finishes_s.append(self.now)
        group.are_whole.append(reason in WHOLE)
        if len(group.tokens) == group.spec.n:
            del self._open_groups[group.spec.id]
        self.kept.append(request)
        self._kept_chunks += len(request.spans)
        while self._kept_chunks > 2 * MOST_CHUNKS and len(self.kept) > 1:
            self._kept_chunks -= len(self.kept.popleft().spans)

    def _drop_requests(self) -> None:
        """Forget the open requests of a rollout that has failed."""
        self.open_requests = 0
        self._open_groups.clear()
        self._requests.clear()

    def _asked(self, request_id: str) -> None:
        """Note that a request acts from now on."""
        request = self._request(request_id)
        if request is not None:
            self._end_wait(request, request.group.spec.prompt_tokens)
            request.acts_since_s = self.now

    def _answered(self, request_id: str, tokens: int) -> None:
        """Note that a request waits for an engine again, with so many tokens of its environment's."""
        request = self._request(request_id)
        if request is not None:
            request.tokens += tokens
            request.unread = tokens
            self._end_act(request)
            request.waits_since_s = self.now

    def _end_act(self, request: ReadRequest) -> None:
        since_s, request.acts_since_s = request.acts_since_s, None
        if since_s is not None and self.now > since_s:
            request.spans.append((since_s, self.now, ACTED))

    def _end_wait(self, request: ReadRequest, need: int) -> None:
        since_s = request.waits_since_s
        if since_s is not None and self.now > since_s:
            self.waits.wait(request.row, since_s, self.now, need)
            request.spans.append((since_s, self.now, need))
        request.waits_since_s = None

    def _load(self, name: str) -> None:
        """Note an instance's load."""
        place, lane = self._follower.places.get(name), self.lanes.get(name)
        if lane is not None:
            lane.load(self.now, *((0, 0) if place is None else (len(place.sent), place.reserved_tokens)))

    def _advance(self) -> None:
        if self.now > self._since_s:
            waiting = self.open_requests - self._follower.running - len(self._follower.acting)
            self.waiting.add(self._since_s, self.now, (max(0, waiting),))
            self._since_s = self.now

    def catch_up(self) -> None:
        """Count the time up to now, and the chunks that have finished."""
        self.finished.catch_up(self.now)
        for lane in self.lanes.values():
            lane.catch_up(self.now)
        self._advance()

    def waited_s(self) -> np.ndarray:
        """Return for how long each request lacked what up to now, as (requests, causes)."""
        going_on = [
            (each.row, each.waits_since_s, self.now, each.group.spec.prompt_tokens)
            for each in self._requests.values()
            if each.waits_since_s is not None
        ] + [
            (row, group.submitted_s, self.now, group.spec.prompt_tokens)
            for group in self._open_groups.values()
            for row in group.unbegun_rows
        ]
        return self.waits.by_request(self.requests, going_on)


def _asked(by: str) -> str:
    return f", as asked by {by}" if by else ""
