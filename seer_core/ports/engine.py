"""Protocols that a backend implements: engine instances, the clock they live on, a tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import attrs
import msgspec

from seer_core.model import InstanceInfo
from seer_core.model.chunks import ChunkJob, ChunkOutput, ChunkPiece
from seer_core.model.events import InstanceDegraded, InstanceReported
from seer_core.ports.drafting import Drafter, SiblingTokens, StepTimes
from seer_core.ports.kv import KVPool
from seer_core.ports.weights import WeightSpec

__all__ = [
    "ChangingFleet",
    "ChunkEnder",
    "ChunkJob",
    "ChunkOutput",
    "ChunkPiece",
    "Clock",
    "EngineFleet",
    "ForeignInstance",
    "HeldClock",
    "InstanceClient",
    "InstanceSink",
    "ModelInfo",
    "PlaceSeeker",
    "PlainFleet",
    "Tokenizer",
]


class ModelInfo(msgspec.Struct, frozen=True):
    """Limits that a prompt must respect; available before any engine starts.

    ``max_temperature`` is the highest that the engines sample with, None without a limit.  ``digest`` stands
    for the model's files, equal for equal ones; empty where it is unknown.  ``controls`` are the fields of
    ``Sampling``, beyond temperature, top-p and top-k, that the engines have.
    """

    vocab_size: int
    """The number of token ids."""
    max_model_tokens: int
    """The most tokens of a prompt and its response."""
    max_temperature: float | None = None
    digest: str = ""
    controls: tuple[str, ...] = ()
    whole_controls: tuple[str, ...] = ()
    """Those of ``controls`` under which the engines cannot go on with a response: it is not divided."""
    divided_attachments: tuple[str, ...] | None = None
    """The names in prompts' ``attachments`` under which the engines can go on with a response, those within
    tables with dots between them; under others it is not divided.  None where engines take no attachments.
    """
    takes_images: bool = False
    """Whether prompts may have images, which the tokenizer places then, and whose responses are divided."""


class InstanceSink(Protocol):
    """Receives all that an engine reports; each method returns at once and is called on the event loop."""

    def chunk_finished(self, instance_id: str, output: ChunkOutput) -> None:
        """Take a finished chunk."""
        ...

    def chunk_failed(self, instance_id: str, job_id: str, reason: str) -> None:
        """Take back a chunk; its instance lives."""
        ...

    def chunk_streamed(self, instance_id: str, piece: ChunkPiece) -> None:
        """Take what a running chunk whose job ``streams`` has written; not all engines send pieces."""
        ...

    def reported(self, report: InstanceReported) -> None:
        """Take an instance's telemetry, which it sends from time to time while it works."""
        ...

    def degraded(self, degradation: InstanceDegraded) -> None:
        """Take note that a part of an instance has failed and it works on; also during its start."""
        ...

    def lost(self, instance_id: str, reason: str) -> None:
        """Take note that an instance has died by itself; all its chunks are void."""
        ...

    def leaving(self, instance_id: str, reason: str) -> None:
        """Take note that an instance has to leave its place soon; it is stopped and started elsewhere."""
        ...


@runtime_checkable
class InstanceClient(Protocol):
    """One inference instance; it never calls its sink from within ``submit`` or ``abort``."""

    id: str
    """The instance's id, which no other has."""

    def set_drafter(self, drafter: Drafter | None) -> bool:
        """Speculate with this drafter, or not at all, from the next ``start`` on.

        Returns whether it drafts from tokens that siblings write on other instances, and so is sent them:
        the drafter must share them.

        Raises:
            EngineError: this engine cannot; it has not been changed.
        """
        ...

    def set_kv_pool(self, pool: KVPool | None) -> bool:
        """Share KV through this pool, or not at all, from the next ``start`` on; return whether it will.

        Raises:
            EngineError: this engine shares KV, but cannot as it is configured.
        """
        ...

    async def start(self, sink: InstanceSink) -> InstanceInfo:
        """Bring the instance up, within the backend's own time limit, or raise ``EngineError``.

        It raises ``NoPlaceError`` where it has no place yet and the others may begin without it; it must be a
        ``PlaceSeeker`` then.  May be called again after a loss or ``stop``; the remains of the old instance
        are ended first.  It begins with its first weights, as version 0; the runtime brings it to the current
        version with ``update_weights`` before it sends a chunk.
        """
        ...

    def submit(self, job: ChunkJob) -> None:
        """Queue a chunk; never blocks.  Exactly one sink call answers it, unless the instance is lost.

        A chunk that the instance cannot run is answered with ``chunk_failed``; one submitted to an
        instance already lost is void.  Where KV runs short, an instance whose info says ``ends_early``
        answers chunks that ``may_end_early`` with the tokens that they have, and preempts only those that
        have none or may not.
        """
        ...

    def abort(self, job_id: str) -> None:
        """Drop a chunk; no sink call follows for it (one already under way may still arrive)."""
        ...

    def add_sibling_tokens(self, text: SiblingTokens) -> None:
        """Take tokens that a response has written on another instance, for drafting; never blocks.

        Only instances that were sent a chunk of its group get them.
        """
        ...

    def forget_group(self, group_id: str) -> None:
        """Drop a finished group from drafting and the KV pool; never blocks.

        Only instances that were sent a chunk of the group are called.
        """
        ...

    async def measure_steps(
        self, batch: Sequence[int], draft_tokens: Sequence[int], context_tokens: int | None = None
    ) -> StepTimes:
        """Measure the duration of decoding steps on this grid; the instance must be idle.

        Each request begins with ``context_tokens`` of context, by default as much as the engine chooses.
        Sizes that the instance cannot run are left out of the answer.

        Raises:
            EngineError: it cannot measure, is busy or down, or can run no size of the grid.
        """
        ...

    async def reset_cache(self) -> None:
        """Drop all cached KV and all state of drafting; the instance must be idle."""
        ...

    async def update_weights(self, source: WeightSpec, version: int) -> str | None:
        """Load new weights into an idle instance; KV of older versions is never used again.

        Returns the fingerprint of what it serves now, which must be the same on every instance that has
        loaded the same weights as the same version; None if the engine has none.  What stands before a colon
        in it says how it was made: only those made alike are compared.

        Raises:
            EngineError: it does not take these weights; it goes on with the old ones, or is lost.
        """
        ...

    async def sleep(self) -> int:
        """Let an idle instance give its memory back until ``wake``; return how many bytes that gave.

        It is the memory of KV, all of which is dropped, and that of weights where the engine can restore
        them; 0 from an engine that keeps both.  An instance asleep gives every chunk back, and raises an
        ``EngineError`` in ``measure_steps``, ``reset_cache`` and ``update_weights``.  One that sleeps already
        returns 0.  After a start it is awake.

        Raises:
            EngineError: it is busy or down, or would sleep if it were configured so; it is awake.
        """
        ...

    async def wake(self) -> None:
        """Take the memory again, and serve the weights of before; an instance that is awake stays so.

        Raises:
            EngineError: it is down, or cannot wake; then only ``stop`` is called any more.
        """
        ...

    async def stop(self) -> None:
        """End the instance and all that it started; idempotent, bounded."""
        ...


@runtime_checkable
class ChunkEnder(Protocol):
    """The further method of an ``InstanceClient`` that can end chunks on demand."""

    def end_chunk(self, job_id: str) -> None:
        """End a chunk now; never blocks.

        ``chunk_finished`` answers it with the tokens that it has, and one or a few more of steps under way.
        One without a token ends with its first.  The response is the same, however its chunks end.  A chunk
        that is not there, or ends by itself first, is no error.
        """
        ...


@runtime_checkable
class PlaceSeeker(Protocol):
    """The further method of an ``InstanceClient`` that may have no place to start again, as on a cluster."""

    async def find_place(self, waiting: Callable[[str], None]) -> None:
        """Wait, without a limit, for a place where the lost instance can start again.

        ``waiting`` is called now and then meanwhile, with what is missing, in words.
        It is called before such a ``start``, and may be cancelled.  The runtime does not wait for it: weights
        are updated and instances sleep meanwhile.
        """
        ...


@runtime_checkable
class ForeignInstance(Protocol):
    """The further attribute of an ``InstanceClient`` over a server that belongs to another program.

    Seer neither starts nor ends it, so a loss uses up no restart: the instance comes back with its server.
    It is a ``PlaceSeeker``, whose ``find_place`` waits for that, and waits longer after short lives.  One
    whose owner has paused it is ``leaving``, and ``find_place`` waits until the pause is over.  The owner may
    load new weights into it: ``update_weights`` with the source ``OWNER`` checks that, and loads none.  Where
    all such instances are down it is called too; each then notes the version alone, and returns None.
    """

    address: str
    """Where the server is."""


@runtime_checkable
class Clock(Protocol):
    """The time a run lives on: the machine's, or a virtual one.

    The runtime calls ``advance`` while it waits for completions.  An engine that itself waits on a
    virtual clock, in ``start`` say, has to move it.
    """

    def now(self) -> float:
        """Seconds since the run's own epoch."""
        ...

    def call_at(self, when_s: float, callback: Callable[[], None]) -> Callable[[], None]:
        """Run ``callback`` at ``when_s``; the function returned cancels it."""
        ...

    async def advance(self, changed: asyncio.Event) -> bool:
        """Let time pass until ``changed``: wait (real), or run callbacks as they fall due (virtual).

        Returns False if nothing will ever happen again.
        """
        ...


@runtime_checkable
class HeldClock(Protocol):
    """The further method of a ``Clock`` whose time does not pass by itself."""

    def hold(self) -> Callable[[], None]:
        """Let no time pass until the function that is returned has been called; further calls do nothing.

        ``advance`` waits meanwhile, for what other programs do.
        """
        ...


@runtime_checkable
class Tokenizer(Protocol):
    """Text to token ids and back."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of a plain prompt, special tokens as the model's tokenizer adds them."""
        ...

    def encode_part(self, text: str) -> list[int]:
        """Return the ids of a text that stands within another, without special tokens."""
        ...

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], template_kwargs: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Return the ids of a chat, with the model's template and the generation prompt.

        ``template_kwargs`` are further variables of the template, ``tools`` among them; without any it is
        called with the messages alone.
        """
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of generated ids, special tokens left out."""
        ...


@runtime_checkable
class EngineFleet(Protocol):
    """The answer of an engine plug-in's factory: instances on one clock, not yet started."""

    @property
    def engines(self) -> Sequence[InstanceClient]:
        """The instances; their ids are distinct."""
        ...

    @property
    def clock(self) -> Clock:
        """The time they all live on."""
        ...

    @property
    def model(self) -> ModelInfo:
        """The limits that a prompt must respect.

        A fleet of servers may ask them for it when it is first read, and raise an ``EngineError`` if none
        answers; it is not read before the plug-ins have been put together.
        """
        ...

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; without one, prompts must be token ids.  It may be asked of a server too."""
        ...


@runtime_checkable
class ChangingFleet(Protocol):
    """The further method of an ``EngineFleet`` whose instances join and leave while a run goes on."""

    async def follow(
        self,
        join: Callable[[InstanceClient], Awaitable[object]],
        leave: Callable[[str], Awaitable[object]],
    ) -> None:
        """Announce instances that join or leave, by id, until it is cancelled.

        Called once all ``engines`` have started.  ``join`` starts an instance, also while a rollout runs, and
        raises an ``EngineError`` if it does not start or the others sleep; ``leave`` ends one for good.
        """
        ...


@attrs.frozen
class PlainFleet:
    """An ``EngineFleet`` of given parts."""

    engines: Sequence[InstanceClient]
    """The instances."""
    clock: Clock
    """The clock that they run on."""
    model: ModelInfo
    """The limits that prompts must respect."""
    tokenizer: Tokenizer | None
    """The model's tokenizer, if there is one."""
