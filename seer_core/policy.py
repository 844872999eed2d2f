"""Protocols that a technique implements: what a plug-in's factory hook returns.

The scheduler calls these as plain methods, from one thread, in a fixed order; they do no I/O, read
no clock and draw no global randomness, so that a trace replays.  Objects passed in are the
scheduler's own: read them, keep references if useful, never change them.

What only some strategies want to know is a Protocol of its own (``InstanceAware``, ``TimeAware``,
``GroupAware``): a strategy that has its methods is told.  So is one that another wraps, by the scheduler
itself: a wrapper passes on the methods of its slot's Protocol, and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import msgspec

from seer_core.events import Command, Event
from seer_core.kv import PoolStats
from seer_core.model import Completion, GroupContext, InstanceStatus, Piece, Request

__all__ = [
    "CompletionObserver",
    "Explaining",
    "GroupAware",
    "GrowthObserver",
    "InstanceAware",
    "LivingObserver",
    "Observer",
    "Placement",
    "Placer",
    "PoolObserver",
    "Prioritizer",
    "Splitter",
    "TimeAware",
]


@runtime_checkable
class Splitter(Protocol):
    """How many tokens the next chunk of a request may have.

    One that is ``InstanceAware`` is told of instances, one that is ``Explaining`` is asked for its reasons.
    """

    def split(self, request: Request) -> int:
        """Return the next chunk's ``max_tokens``, a whole number in 1 .. ``request.remaining_tokens``."""
        ...


@runtime_checkable
class InstanceAware(Protocol):
    """A splitter that wants to know which instances there are."""

    def instance_started(self, instance: InstanceStatus) -> None:
        """Learn of an instance, before anything is placed there."""
        ...

    def instance_lost(self, instance: InstanceStatus) -> None:
        """Forget an instance, until it has started anew."""
        ...


@runtime_checkable
class Explaining(Protocol):
    """A splitter that says what the length of its chunks follows from."""

    def explain(self) -> str:
        """Return it in a few words; the log says it once the instances have started."""
        ...


@runtime_checkable
class Prioritizer(Protocol):
    """Owns the waiting queue; one decision costs at most O(log n)."""

    def push(self, request: Request) -> None:
        """Take a request that waits: a new one, one between chunks, or one given back."""
        ...

    def peek(self) -> Request | None:
        """Return the request to serve next, without removing it; the same one until something changes."""
        ...

    def take(self, request: Request) -> None:
        """Remove a waiting request, mostly the one last returned by ``peek``.

        It may be any other: one that was aborted, or that later arrivals have overtaken for too long, which
        then runs, and comes back.
        """
        ...

    def group_changed(self, group: GroupContext, request: Request) -> None:
        """Learn that a response of ``group`` is over; ``group.left`` 0 means that the group is.

        ``request`` is that response, with ``request.generated_tokens`` in all; it is not used again.
        """
        ...

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        ...


class Placement(msgspec.Struct, frozen=True, gc=False):
    """A placer's choice with its reason, in a word, which the trace keeps."""

    instance: InstanceStatus
    why: str


@runtime_checkable
class Placer(Protocol):
    """Chooses the instance of a chunk."""

    def instance_changed(self, instance: InstanceStatus) -> None:
        """Learn that an instance has started or that its load has changed."""
        ...

    def instance_lost(self, instance: InstanceStatus) -> None:
        """Forget an instance; ``place`` may not return it again until it has started anew."""
        ...

    def place(
        self, request: Request, chunk_tokens: int, instances: Sequence[InstanceStatus]
    ) -> InstanceStatus | Placement | None:
        """Return one of the living ``instances`` for this chunk, or None to keep it waiting.

        A ``Placement`` adds the reason.  None means "not before something changes": the queue is asked again
        after the next event.
        """
        ...


@runtime_checkable
class TimeAware(Protocol):
    """A splitter, prioritizer or placer that wants to know the time, for ages and deadlines."""

    def tick(self, now: float) -> None:
        """Learn the time, in seconds on the run's clock: that of the event that is about to be handled.

        Called before anything else of each event.  It is the time of the trace, so a replay tells the same.
        Nothing is decided between two events: a time that passes meanwhile is learnt with the next one.
        """
        ...


@runtime_checkable
class GroupAware(Protocol):
    """A splitter or placer that remembers groups, and wants to forget them."""

    def group_over(self, group: GroupContext) -> None:
        """Learn that all responses of ``group`` are over."""
        ...


@runtime_checkable
class Observer(Protocol):
    """Sees every event and the commands it led to, after the fact; it decides nothing.

    One that raises is logged and left out; the rollout goes on.  One that opens something, such as a file or
    a port, is a ``LivingObserver``.  One that wants to see responses is a ``CompletionObserver``, while they
    are written a ``GrowthObserver``; one that wants to know how the KV pool fares is a ``PoolObserver``.
    """

    def observe(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        """Take note; ``now`` is in seconds on the run's clock."""
        ...


@runtime_checkable
class CompletionObserver(Observer, Protocol):
    """An observer that sees each response when it is over."""

    def completed(self, now: float, completion: Completion) -> None:
        """Take note of a response, after the event that ended it; it is the user's, so change nothing."""
        ...


@runtime_checkable
class GrowthObserver(Observer, Protocol):
    """An observer that sees responses of groups that ``streams`` while their chunks run."""

    def grew(self, now: float, piece: Piece) -> None:
        """Take note of what a chunk has written, if its engine can tell; the rest comes when it ends.

        A chunk that is repeated, because its instance was lost say, is told from its first token again: to
        the same tokens, but for the rounding of another kind of instance.
        """
        ...


@runtime_checkable
class PoolObserver(Observer, Protocol):
    """An observer that sees the KV pool in figures, where there is a pool."""

    def pool_reported(self, now: float, stats: PoolStats) -> None:
        """Take note; called with an instance's report, not more than once in a second, and at the end."""
        ...


@runtime_checkable
class LivingObserver(Observer, Protocol):
    """An observer with a life: what ``start`` opens, ``stop`` closes."""

    async def start(self) -> None:
        """Begin; called before the engines start.  If it raises, nothing is left open and nothing starts."""
        ...

    async def stop(self) -> None:
        """End; called once after each ``start``, when the engines have ended, also if it was left out."""
        ...
