"""Protocols that a backend implements: engine instances, the clock they live on, a tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import msgspec

from seer_core.chunks import ChunkJob, ChunkOutput, ChunkPiece
from seer_core.drafting import Drafter, SiblingText, StepTimes
from seer_core.events import InstanceReported, InstanceTroubled
from seer_core.kv import KVPool
from seer_core.model import InstanceInfo
from seer_core.weights import WeightSpec

__all__ = [
    "ChunkJob",
    "ChunkOutput",
    "ChunkPiece",
    "Clock",
    "Engine",
    "EngineFleet",
    "EngineSink",
    "ModelInfo",
    "Tokenizer",
]


class ModelInfo(msgspec.Struct, frozen=True):
    """What a prompt must respect; known before any engine starts.

    ``max_temperature`` is the highest that the engines sample with, None without a limit.  ``digest`` stands
    for the model's files, equal for equal ones; empty where it is not known.
    """

    vocab_size: int
    max_model_tokens: int
    max_temperature: float | None = None
    digest: str = ""


class EngineSink(Protocol):
    """Where an engine reports; every method returns at once and is called on the runtime's thread."""

    def chunk_finished(self, instance_id: str, output: ChunkOutput) -> None:
        """A chunk came to its end."""
        ...

    def chunk_failed(self, instance_id: str, job_id: str, reason: str) -> None:
        """The instance lives but gives this chunk back."""
        ...

    def chunk_grew(self, instance_id: str, piece: ChunkPiece) -> None:
        """A running chunk whose job ``streams`` has written this; an engine that cannot tell never calls."""
        ...

    def reported(self, report: InstanceReported) -> None:
        """The instance's telemetry, every now and then while it works."""
        ...

    def troubled(self, trouble: InstanceTroubled) -> None:
        """A part of the instance fails and the instance works on without it; also during its start."""
        ...

    def lost(self, instance_id: str, reason: str) -> None:
        """The instance died by itself; all its chunks are void."""
        ...


@runtime_checkable
class Engine(Protocol):
    """One inference instance; it never calls its sink from within ``submit`` or ``abort``."""

    id: str

    def draft_with(self, drafter: Drafter | None) -> bool:
        """Speculate with this drafter, or not at all, from the next ``start`` on.

        Returns whether it is to be taught what siblings write on other instances: if it drafts from their
        text, and the drafter ``shares``.

        Raises:
            EngineError: this engine cannot; it has not been changed.
        """
        ...

    def share_kv(self, pool: KVPool | None) -> bool:
        """Share KV through this pool, or with nobody, from the next ``start`` on; return whether it will.

        Raises:
            EngineError: this engine shares KV, but cannot as it is configured.
        """
        ...

    async def start(self, sink: EngineSink) -> InstanceInfo:
        """Bring the instance up, within the backend's own time limit, or raise ``EngineError``.

        May be called again after a loss or ``stop``; what is left of the old one is ended first.  It begins
        at its first weights, as version 0, whatever it had before: the runtime brings it to the version of
        the day with ``update_weights`` before it sends a chunk.
        """
        ...

    def submit(self, job: ChunkJob) -> None:
        """Queue a chunk; never blocks.  Exactly one sink call answers it, unless the instance is lost.

        A chunk that the instance cannot run is answered with ``chunk_failed``; one submitted to an
        instance already lost is void.
        """
        ...

    def abort(self, job_id: str) -> None:
        """Drop a chunk; no sink call follows for it (one already under way may still arrive)."""
        ...

    def teach(self, text: SiblingText) -> None:
        """Let drafting know what a response has written on another instance; never blocks.

        Only instances that were given a chunk of its group are told.
        """
        ...

    def forget_group(self, group_id: str) -> None:
        """Drop what drafting and the KV pool remember of a group that is over; never blocks.

        Only instances that were given a chunk of the group are told.
        """
        ...

    async def measure_steps(
        self, batch: Sequence[int], draft_tokens: Sequence[int], context_tokens: int | None = None
    ) -> StepTimes:
        """Measure the duration of decoding steps on this grid; the instance must be idle.

        Each request begins with ``context_tokens`` of context, or as much as the engine likes.  Sizes that
        the instance cannot run are left out of the answer.

        Raises:
            EngineError: it cannot measure, is busy or down, or can run no size of the grid.
        """
        ...

    async def reset_cache(self) -> None:
        """Forget all cached KV and all that drafting remembers; the instance must be idle."""
        ...

    async def update_weights(self, source: WeightSpec, version: int) -> str | None:
        """Load what ``source`` names into an idle instance; KV of older versions is never used again.

        Returns the fingerprint of what it serves now, which must be the same on every instance that has
        loaded the same weights as the same version; None if the engine has none.  What stands before a colon
        in it says how it was made: only those made alike are compared.

        Raises:
            EngineError: it does not take these weights; it goes on with the old ones, or is lost.
        """
        ...

    async def sleep(self) -> int:
        """Let an idle instance give its memory back until ``wake``; return how many bytes that gave.

        It is the memory of KV, all of which is forgotten, and that of weights where the engine can take them
        back as they were; 0 from an engine that keeps both.  Whatever it gives, an instance asleep gives
        every chunk back, and raises an ``EngineError`` when it is asked to measure steps, to reset its cache
        or to update weights.  One that sleeps already returns 0.  A start is awake.

        Raises:
            EngineError: it is busy or down, or would sleep if it were configured so; it is awake.
        """
        ...

    async def wake(self) -> None:
        """Take the memory again, and serve the weights of before; an instance that is awake stays so.

        Raises:
            EngineError: it is down, or cannot wake; then nothing but ``stop`` is asked of it any more.
        """
        ...

    async def stop(self) -> None:
        """End the instance and whatever it started; idempotent, bounded."""
        ...


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
class Tokenizer(Protocol):
    """Text to token ids and back."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of a plain prompt, special tokens as the model's tokenizer adds them."""
        ...

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the ids of a chat, with the model's template and the generation prompt."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of generated ids, special tokens left out."""
        ...


@runtime_checkable
class EngineFleet(Protocol):
    """What an engine plug-in's factory returns: instances on one clock, not yet started."""

    @property
    def engines(self) -> Sequence[Engine]:
        """The instances; their ids are distinct."""
        ...

    @property
    def clock(self) -> Clock:
        """The time they all live on."""
        ...

    @property
    def model(self) -> ModelInfo:
        """What a prompt must respect."""
        ...

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; without one, prompts must be token ids."""
        ...
