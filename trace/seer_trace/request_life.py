"""The lives of requests, read from a run's events: their chunks, and for what they waited in between."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import accumulate

import attrs
import msgspec

from seer_core.model import WHOLE
from seer_core.model.events import (
    AskEnvironment,
    Command,
    Complete,
    Dispatch,
    EnvironmentAnswered,
    EnvironmentFailed,
    Event,
    GroupSpec,
    GroupsSubmitted,
    InstanceReported,
    InstanceStarted,
)
from seer_trace.chunk_runs import Cause, ChunkFollower, ChunkRun, group_of

__all__ = ["LifeReader", "RequestLife", "Wait"]


class Wait(msgspec.Struct, frozen=True, tag=True):
    """A time in which no chunk of the request ran."""

    begin_s: float
    """When it began, in seconds on the run's clock."""
    end_s: float
    """When the next chunk was sent, its environment was asked or answered, or the trace ended."""
    causes_s: dict[Cause, float]
    """How long it lacked what."""


class RequestLife(msgspec.Struct):
    """One request, as a trace has it."""

    request_id: str
    """The request, as ``GROUP/INDEX``."""
    group: GroupSpec
    """Its group."""
    submitted_s: float
    """When the group was submitted, in seconds on the run's clock."""
    parts: list[Wait | ChunkRun]
    """Waits and chunks in order."""
    finished_s: float | None = None
    """When the response was complete."""
    finish_reason: str | None = None
    """Why it was over."""
    siblings_done: list[tuple[float, int]] = []
    """When each response of its group was complete that was so before it, and its tokens."""

    @property
    def chunks(self) -> list[ChunkRun]:
        """Its chunks in order."""
        return [part for part in self.parts if isinstance(part, ChunkRun)]

    answer_tokens: int = 0
    """The tokens that its environment answered."""

    siblings_whole: list[tuple[float, int]] = []
    """Those of ``siblings_done`` that ended by themselves or at their limit."""

    @property
    def tokens(self) -> int:
        """The tokens that its chunks brought."""
        return sum(each.result.tokens for each in self.chunks if each.result is not None)

    @property
    def earlier_tokens(self) -> int:
        """The tokens from before the run was resumed, with those of its environment."""
        index = int(self.request_id.rpartition("/")[2])
        resumed = self.group.resumed
        return resumed[index].tokens if index < len(resumed) else 0

    def estimate_at(self, at_s: float) -> int | None:
        """Return the longest response of its group that was whole then, None if none was.

        By it the paper's scheduler estimates the others of the group (arXiv 2511.14617, Algorithm 2).
        """
        return max((tokens for done_s, tokens in self.siblings_whole if done_s <= at_s), default=None)

    def waited_s(self) -> dict[Cause, float]:
        """Return how long it lacked what, in all."""
        found: dict[Cause, float] = {}
        for part in self.parts:
            if isinstance(part, Wait):
                for cause, seconds in part.causes_s.items():
                    found[cause] = found.get(cause, 0.0) + seconds
        return found


Lack = Cause | int
"""A cause, or else the most KV that an instance with a free slot has, in tokens."""

BLOCK = 128
"""Changes that are summed up together: a wait that spans them all costs two look-ups."""


@attrs.frozen(eq=False)
class _LackBlock:
    """Changes of what requests lack, from one time to another, and their sums."""

    times_s: list[float]
    """The time of each change, and at the end that of the next one."""
    lacks: list[Lack]
    named_s: dict[Cause, float]
    """The seconds of each lack that is a cause."""
    free_tokens: list[int]
    """The other lacks in ascending order."""
    less_s: list[float]
    """The seconds in which there was less free KV than each of them, and at the end of them all."""

    @classmethod
    def of(cls, times_s: list[float], lacks: list[Lack]) -> _LackBlock:
        named_s: dict[Cause, float] = {}
        free = []
        for lack, begin_s, end_s in zip(lacks, times_s, times_s[1:], strict=False):
            if isinstance(lack, int):
                free.append((lack, end_s - begin_s))
            else:
                named_s[lack] = named_s.get(lack, 0.0) + end_s - begin_s
        free.sort()
        less_s = [0.0, *accumulate(seconds for _, seconds in free)]
        return cls(times_s, lacks, named_s, [lack for lack, _ in free], less_s)

    def add_all(self, needed: int, found: dict[Cause, float]) -> None:
        """Add the seconds of all changes for a request that needs so much KV, in tokens."""
        kv_s = self.less_s[bisect_left(self.free_tokens, needed)]
        for cause, seconds in (*self.named_s.items(), ("kv", kv_s), ("turn", self.less_s[-1] - kv_s)):
            if seconds > 0.0:
                found[cause] = found.get(cause, 0.0) + seconds


@attrs.define(eq=False)
class _LackLog:
    """For how long requests lacked what: whole blocks of changes, and those since."""

    blocks: deque[_LackBlock] = attrs.Factory(deque)
    times_s: list[float] = attrs.Factory(list)
    lacks: list[Lack] = attrs.Factory(list)

    def note(self, now: float, lack: Lack) -> bool:
        """Note what is lacking from now on, and return whether that completed a block."""
        if self.lacks and self.lacks[-1] == lack:
            return False
        self.times_s.append(now)
        self.lacks.append(lack)
        if len(self.lacks) <= BLOCK:
            return False
        self.blocks.append(_LackBlock.of(self.times_s, self.lacks[:BLOCK]))
        self.times_s, self.lacks = self.times_s[BLOCK:], self.lacks[BLOCK:]
        return True

    def forget(self, before_s: float) -> None:
        """Drop what no wait that began at ``before_s`` or later needs."""
        while self.blocks and self.blocks[0].times_s[-1] <= before_s:
            self.blocks.popleft()

    def causes_s(self, begin_s: float, end_s: float, needed: int) -> dict[Cause, float]:
        """Return for how long a request that needed so much KV, in tokens, lacked what up to now."""
        found: dict[Cause, float] = {}
        for block in reversed(self.blocks):
            if block.times_s[0] < begin_s:
                if block.times_s[-1] > begin_s:
                    _add_each(block.times_s, block.lacks, begin_s, needed, found)
                break
            block.add_all(needed, found)
        _add_each([*self.times_s, end_s], self.lacks, begin_s, needed, found)
        return found


def _add_each(
    times_s: list[float], lacks: list[Lack], begin_s: float, needed: int, found: dict[Cause, float]
) -> None:
    """Add the seconds of each change since ``begin_s``."""
    first = max(0, bisect_right(times_s, begin_s) - 1)
    for at in range(first, len(lacks)):
        seconds, lack = times_s[at + 1] - max(times_s[at], begin_s), lacks[at]
        if seconds > 0.0:
            cause: Cause = ("turn" if lack >= needed else "kv") if isinstance(lack, int) else lack
            found[cause] = found.get(cause, 0.0) + seconds


@attrs.define(eq=False)
class _FollowedGroup:
    """A group of which a request at least is followed."""

    left: int
    """How many responses it still lacks."""
    tokens: dict[str, int]
    """What each of its responses has so far."""
    done: list[tuple[float, int]] = attrs.Factory(list)
    """When each of its complete responses was so, and its tokens."""
    whole: list[tuple[float, int]] = attrs.Factory(list)
    """Those that ended by themselves or at their limit."""


@attrs.define(eq=False)
class LifeReader:
    """Follows a run, event by event, and keeps the requests that are not over; ``only`` follows one alone.

    Where siblings share a prompt, the KV that a request lacked is that of one without siblings in flight, so
    a wait for its turn may be taken for a lack of KV.
    """

    only: str | None = None
    _follower: ChunkFollower = attrs.Factory(ChunkFollower)
    _open: dict[str, RequestLife] = attrs.Factory(dict)
    _waits_since: dict[str, float] = attrs.Factory(dict)
    _acts_since: dict[str, float] = attrs.Factory(dict)
    _groups: dict[str, _FollowedGroup] = attrs.Factory(dict)
    _lacks: _LackLog = attrs.Factory(_LackLog)

    def read(self, now: float, event: Event, commands: Sequence[Command]) -> list[RequestLife]:
        """Apply an event and its commands; return the lives that are over with it.

        Those of a rollout that has failed are over with the first instance that starts anew, unfinished.
        """
        failed = isinstance(event, InstanceStarted) and event.info.id in self._follower.places
        self._ended(self._follower.read(now, event, commands))
        if failed:
            dropped = self._end_open()
            self._open.clear()
            self._groups.clear()
            self._note_lack()
            return dropped
        match event:
            case GroupsSubmitted(groups):
                self._submitted(groups)
            case EnvironmentAnswered(request_id, tokens):
                self._answered(request_id, tokens)
            case EnvironmentFailed(request_id):
                self._answered(request_id, 0)
        over: list[RequestLife] = []
        for command in commands:
            match command:
                case Dispatch(request_id) if request_id in self._open:
                    self._end_wait(self._open[request_id], command.kv_tokens)
                case AskEnvironment(request_id) if request_id in self._open:
                    self._end_wait(self._open[request_id], 0)
                    self._acts_since[request_id] = self._follower.now
                case Complete(request_id, reason):
                    over += self._completed(request_id, reason)
        if commands or not isinstance(event, InstanceReported):
            self._note_lack()
        return over

    @property
    def now(self) -> float:
        """The time of the last event, in seconds on the run's clock."""
        return self._follower.now

    def rest(self) -> list[RequestLife]:
        """Return the lives that the end of the trace, or of the run, left open; nothing more is read then."""
        lives = self._end_open()
        self._ended(self._follower.rest())
        return lives

    def _end_open(self) -> list[RequestLife]:
        """Return the lives that are open, without what they wait for any more."""
        for life in self._open.values():
            self._end_act(life)
            self._end_wait(life, life.group.prompt_tokens)
            group = self._groups[life.group.id]
            life.siblings_done, life.siblings_whole = group.done, group.whole
        return [*self._open.values()]

    def _submitted(self, groups: Iterable[GroupSpec]) -> None:
        now = self._follower.now
        for group in groups:
            names = [f"{group.id}/{index}" for index in range(group.n)]
            followed = [name for name in names if self.only in (None, name)]
            for name in followed:
                self._open[name] = RequestLife(name, group, now, [])
                self._waits_since[name] = now
            if followed:
                tokens = {name: each.tokens for name, each in zip(names, group.resumed, strict=False)}
                self._groups[group.id] = _FollowedGroup(group.n, tokens)

    def _ended(self, chunks: Iterable[ChunkRun]) -> None:
        """Note chunks that are over, and the tokens that they brought."""
        for chunk in chunks:
            group = self._groups.get(group_of(chunk.request_id))
            if group is not None and chunk.result is not None:
                before = group.tokens.get(chunk.request_id, 0)
                group.tokens[chunk.request_id] = before + chunk.result.tokens
            life = self._open.get(chunk.request_id)
            if life is not None:
                life.parts.append(chunk)
                self._waits_since[chunk.request_id] = chunk.end_s

    def _completed(self, request_id: str, reason: str) -> Iterable[RequestLife]:
        """Yield the request's life, if it is followed."""
        group = self._groups.get(group_of(request_id))
        if group is None:
            return
        life = self._open.pop(request_id, None)
        if life is not None:
            self._end_act(life)
            self._end_wait(life, life.group.prompt_tokens)
            life.finished_s, life.finish_reason = self._follower.now, reason
            life.siblings_done, life.siblings_whole = group.done[:], group.whole[:]
            yield life
        done = self._follower.now, group.tokens.pop(request_id, 0)
        group.done.append(done)
        if reason in WHOLE:
            group.whole.append(done)
        group.left -= 1
        if not group.left:
            del self._groups[group_of(request_id)]

    def _answered(self, request_id: str, tokens: int) -> None:
        """Note the answer of a request's environment; the request waits for an engine from now on."""
        group, life = self._groups.get(group_of(request_id)), self._open.get(request_id)
        if group is not None:
            group.tokens[request_id] = group.tokens.get(request_id, 0) + tokens
        if life is not None:
            self._end_act(life)
            life.answer_tokens += tokens
            self._waits_since[request_id] = self._follower.now

    def _end_act(self, life: RequestLife) -> None:
        """Note that the request acted until now, if it did and that took any time."""
        now, since_s = self._follower.now, self._acts_since.pop(life.request_id, None)
        if since_s is not None and now > since_s:
            life.parts.append(Wait(since_s, now, {"environment": now - since_s}))

    def _end_wait(self, life: RequestLife, needed: int) -> None:
        """Note the wait that ends now, if it took any time; the request then needed so much KV."""
        now, since_s = self._follower.now, self._waits_since.pop(life.request_id, None)
        if since_s is not None and now > since_s:
            life.parts.append(Wait(since_s, now, self._lacks.causes_s(since_s, now, needed)))

    def _note_lack(self) -> None:
        """Note what waiting requests lack from now on, and forget what was before all waits."""
        if not self._waits_since:
            self._lacks = _LackLog()
            return
        if self._lacks.note(self._follower.now, self._follower.lack()):
            self._lacks.forget(min(self._waits_since.values()))
