"""The life of one request, read from a trace: its chunks, and for what it waited in between."""

from __future__ import annotations

from collections.abc import Iterable

import attrs
import msgspec

from seer_cli.chunk_runs import Cause, ChunkFollower, ChunkRun
from seer_core.errors import InputError, quote
from seer_core.model.events import (
    Complete,
    Dispatch,
    GroupSpec,
    GroupsSubmitted,
)
from seer_core.scheduling.trace import TraceRecord

__all__ = ["Cause", "RequestLife", "Wait", "life_of"]


class Wait(msgspec.Struct, frozen=True, tag=True):
    """A time in which no chunk of the request ran."""

    begin_s: float
    """When it began, in seconds on the run's clock."""
    end_s: float
    """When the next chunk was sent, or the trace ended."""
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

    @property
    def tokens(self) -> int:
        """The tokens that its chunks brought."""
        return sum(each.result.tokens for each in self.chunks if each.result is not None)

    def estimate_at(self, at_s: float) -> int | None:
        """Return the longest response of its group that was complete then, None if none was.

        By it the paper's scheduler estimates the others of the group (arXiv 2511.14617, Algorithm 2).
        """
        return max((tokens for done_s, tokens in self.siblings_done if done_s <= at_s), default=None)

    def waited_s(self) -> dict[Cause, float]:
        """Return how long it lacked what, in all."""
        found: dict[Cause, float] = {}
        for part in self.parts:
            if isinstance(part, Wait):
                for cause, seconds in part.causes_s.items():
                    found[cause] = found.get(cause, 0.0) + seconds
        return found


@attrs.define
class _LifeReader:
    """Follows a trace; ``moments`` are the parts of the present wait."""

    request_id: str
    life: RequestLife | None = None
    follower: ChunkFollower = attrs.Factory(ChunkFollower)
    waits_since: float | None = None
    moments: list[tuple[float, Cause | int]] = attrs.Factory(list)
    """Seconds, and what lacked in them; a number is the most KV that an instance with a free slot had."""
    tokens: dict[str, int] = attrs.Factory(dict)
    """What each response of the group has so far."""

    def read(self, record: TraceRecord) -> None:
        """Apply an event and its commands."""
        if self.waits_since is not None:
            self.moments.append((record.now - self.follower.now, self.follower.lack()))
        self._ended(self.follower.read(record))
        match record.event:
            case GroupsSubmitted(groups):
                self._submitted(groups)
        for command in record.commands:
            match command:
                case Dispatch(request_id) if request_id == self.request_id:
                    self._end_wait(command.kv_tokens)
                case Complete(request_id, reason):
                    self._completed(request_id, reason)

    def end(self) -> RequestLife | None:
        """Return the life, with what the trace's end left open."""
        if self.life is not None and self.life.finished_s is None:
            self._end_wait(self.life.group.prompt_tokens)
            self._ended(self.follower.rest())
        return self.life

    def _submitted(self, groups: Iterable[GroupSpec]) -> None:
        name, _, index = self.request_id.rpartition("/")
        for group in groups:
            if name == group.id and self.life is None and index.isdecimal() and int(index) < group.n:
                self.life = RequestLife(self.request_id, group, self.follower.now, [])
                self.tokens = {f"{name}/{i}": each.tokens for i, each in enumerate(group.resumed or ())}
                self.waits_since = self.follower.now

    def _ended(self, chunks: Iterable[ChunkRun]) -> None:
        """Note the request's own among chunks that are over, and the tokens of all of its group."""
        for chunk in chunks:
            if chunk.result is not None and self._of_group(chunk.request_id):
                before = self.tokens.get(chunk.request_id, 0)
                self.tokens[chunk.request_id] = before + chunk.result.tokens
            if chunk.request_id == self.request_id:
                assert self.life is not None
                self.life.parts.append(chunk)
                self.waits_since = chunk.end_s

    def _completed(self, request_id: str, reason: str) -> None:
        if self.life is None or not self._of_group(request_id):
            return
        if request_id == self.request_id:
            self._end_wait(self.life.group.prompt_tokens)
            self.life.finished_s, self.life.finish_reason = self.follower.now, reason
        elif self.life.finished_s is None:
            self.life.siblings_done.append((self.follower.now, self.tokens.get(request_id, 0)))

    def _of_group(self, request_id: str) -> bool:
        return self.life is not None and request_id.rpartition("/")[0] == self.life.group.id

    def _end_wait(self, needed: int) -> None:
        """Note the wait that ends now, if it took any time; the request then needed so much KV."""
        assert self.life is not None
        now = self.follower.now
        if self.waits_since is not None and now > self.waits_since:
            causes: dict[Cause, float] = {}
            for seconds, lack in self.moments:
                cause: Cause = ("turn" if lack >= needed else "kv") if isinstance(lack, int) else lack
                if seconds > 0:
                    causes[cause] = causes.get(cause, 0.0) + seconds
            self.life.parts.append(Wait(self.waits_since, now, causes))
        self.waits_since = None
        self.moments.clear()


def life_of(request_id: str, records: Iterable[TraceRecord]) -> RequestLife:
    """Return the life of a request, ``GROUP/INDEX``.

    Where siblings share a prompt, the KV that a request lacked is that of one without siblings in flight, so
    a wait for its turn may be taken for a lack of KV.

    Raises:
        InputError: the trace has no such request.
    """
    reader = _LifeReader(request_id)
    groups: list[str] = []
    for record in records:
        if isinstance(record.event, GroupsSubmitted):
            groups += [each.id for each in record.event.groups[: max(0, 3 - len(groups))]]
        reader.read(record)
    life = reader.end()
    if life is None:
        named = ", ".join(quote(f"{each}/0") for each in groups)
        raise InputError(
            f"the trace has no request {quote(request_id)}; name one as GROUP/INDEX"
            + (f", like {named}" if named else "")
        )
    return life
