"""Protocols that a technique implements: what a plug-in's factory hook returns.

The scheduler calls these as plain methods, from one thread, in a fixed order; they do no I/O, read no clock
and draw no global randomness, so that a trace replays.  Objects passed in are the scheduler's own: read them,
keep references if useful, never change them.

A method marked ``optional`` does nothing unless it is implemented.  A class may derive from its Protocol, or
simply have the methods.  A public method with nearly the name of an optional one is refused at start.

Where one strategy wraps another, the scheduler calls the optional methods of both.  A wrapper passes on the
required methods of its slot's Protocol, and no others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from seer_core.model import Completion, GroupContext, InstanceStatus, Request
from seer_core.model.events import ChunkFinished, Command, Event
from seer_core.ports.contracts import optional
from seer_core.ports.kv import PoolStats

__all__ = ["Observer", "Placement", "Placer", "Prioritizer", "Splitter", "Strategy"]


class Strategy(Protocol):
    """The notifications that the scheduler sends to splitters, prioritizers and placers.

    An object that fills two slots is notified once.
    """

    @optional
    def tick(self, now: float) -> None:
        """Receive the time of an event, in seconds on the run's clock, before anything else of that event.

        It is the time of the trace, so a replay decides the same.  Nothing is decided between two events: a
        time that passes meanwhile comes with the next one.
        """
        return

    @optional
    def instance_started(self, instance: InstanceStatus) -> None:
        """Receive a new instance, before anything is placed there."""
        return

    @optional
    def instance_changed(self, instance: InstanceStatus) -> None:
        """Note that an instance has started or that its load has changed."""
        return

    @optional
    def instance_lost(self, instance: InstanceStatus) -> None:
        """Forget an instance; it is not to be placed on again until it has started anew."""
        return

    @optional
    def chunk_ended(self, request: Request, instance: InstanceStatus, finished: ChunkFinished | None) -> None:
        """Note that a chunk is over, while the instance's load still counts it; None: it brought nothing."""
        return

    @optional
    def turn_ended(self, request: Request) -> None:
        """Note that the environment of a response begins to work on its last turn; its KV is where it ran.

        When it has answered, the request is pushed again, or ``group_changed`` says that it is over.
        """
        return

    @optional
    def group_changed(self, group: GroupContext, request: Request) -> None:
        """Note that a response of ``group`` is over; ``group.left`` 0 means that the group is.

        ``request`` is that response, with ``request.generated_tokens`` in all; it is not used again.  It
        changes the estimates of all groups of ``group.family``, of which no other is notified.
        """
        return

    @optional
    def group_over(self, group: GroupContext) -> None:
        """Forget a group, all responses of which are over."""
        return


class Splitter(Strategy, Protocol):
    """How many tokens the next chunk of a request may have."""

    def split(self, request: Request) -> int:
        """Return the next chunk's ``max_tokens``, a whole number in 1 .. ``request.remaining_tokens``."""
        ...

    @optional
    def explain(self) -> str:
        """Return in a few words what the lengths follow from; logged once the instances have started."""
        return ""


class Prioritizer(Strategy, Protocol):
    """Owns the waiting queue; one decision costs at most O(log n)."""

    def push(self, request: Request) -> None:
        """Queue a request that waits: a new one, one between chunks, or one given back."""
        ...

    def peek(self) -> Request | None:
        """Return the request to serve next, without removing it; the same one until something changes."""
        ...

    def take(self, request: Request) -> None:
        """Remove a waiting request, mostly the one last returned by ``peek``.

        It may be any other: one that was aborted, or that later arrivals have overtaken for too long, which
        then runs, and comes back.  Its ``state`` is another one before ``peek`` is called again.
        """
        ...

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        ...


class Placement(msgspec.Struct, frozen=True, gc=False):
    """A placer's choice with its reason, in a word, which the trace keeps.

    ``reserved_tokens``: KV is reserved for so many of the chunk's tokens, 1 at least, and the chunk may end
    early where KV runs short all the same.  An instance that does not ``ends_early`` preempts then, so
    take less than all only where it ``overcommits``.  None reserves KV for all of them.
    """

    instance: InstanceStatus
    """The instance that gets the chunk."""
    why: str
    """The reason, in a word."""
    reserved_tokens: int | None = None


class Placer(Strategy, Protocol):
    """Chooses the instance of a chunk.

    An instance has its limits and what a move there costs (``info``), and its load.
    """

    def place(
        self, request: Request, chunk_tokens: int, instances: Sequence[InstanceStatus]
    ) -> InstanceStatus | Placement | None:
        """Return one of the living ``instances`` for this chunk, or None to keep it waiting.

        A ``Placement`` adds the reason.  None means "not before something changes": the queue is asked again
        after the next event.
        """
        ...

    @optional
    def has_room(self) -> bool:
        """Return whether ``place`` might accept any request now; while it is False, nothing is asked.

        After most events one request is sent and nothing more fits, so a quick answer saves a question of
        every strategy.  Of placers that wrap others only the outermost is asked.
        """
        return True

    @optional
    def to_end(self) -> Iterable[Request]:
        """Return running requests whose chunks are to end now, so that they go on elsewhere or later.

        Asked after each event, when nothing more is placed.  A chunk has ended once ``chunk_ended`` says so,
        with the tokens that it has by then; an instance that cannot end chunks lets it go on.
        """
        return ()


class Observer(Protocol):
    """Sees every event and the commands it led to, after the fact; it decides nothing.

    One that raises is logged and left out; the rollout goes on.
    """

    def observe(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        """Take note of an event at ``now``, in seconds on the run's clock."""
        ...

    @optional
    def completed(self, now: float, completion: Completion) -> None:
        """Take note of a response, after the event that ended it; it is the user's, so change nothing."""
        return

    @optional
    def streamed(self, now: float, request_id: str) -> None:
        """Take note that a running chunk has written more, which the rollout's ``written`` returns.

        Called for groups that stream (``PromptGroup.streams``), on engines that report pieces.  A chunk that
        is repeated, because its instance was lost for example, is written from its first token again: with
        the same tokens, but for the rounding of another kind of instance.
        """
        return

    @optional
    def pool_reported(self, now: float, stats: PoolStats) -> None:
        """Take note of the KV pool's figures, where there is a pool.

        Called with an instance's report, not more than once in a second, and at the end.
        """
        return

    @optional
    async def start(self) -> None:
        """Open what the observer needs, such as a file or a port; called before the engines start.

        If it raises, it has to leave nothing open, and nothing starts.
        """
        return

    @optional
    async def stop(self) -> None:
        """Close what ``start`` opened.

        Called once after each ``start``, when the engines have ended, also for an observer that was left out.
        """
        return
