"""The contract of an engine's author: one instance of the engine, as its worker process drives it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from seer_core.errors import EngineError
from seer_core.model import InstanceInfo
from seer_core.model.arrays import TopLogprobs
from seer_core.ports.contracts import optional
from seer_core.ports.drafting import SiblingTokens, StepTimes
from seer_core.ports.engine import ChunkJob
from seer_core.ports.weights import WeightSpec
from seer_worker.process.loader import ImportedClass
from seer_worker.wire import Degraded, Failed, Finished, Telemetry

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["DRAFTS", "INSTANCE", "SHARES_KV", "EngineAdapter", "LogitRow", "Rejected"]


class Rejected(EngineError):
    """An instance will not do as it was asked; nothing has changed, and it goes on.

    Remedy: change the call as the message says.
    """


class LogitRow(NamedTuple):
    """The logits from which a request with this seed got its token at this position, float32 [vocab].

    The position counts the tokens before it, prompt included.
    """

    seed: int
    """The request's seed."""
    position: int
    """The number of tokens before it."""
    logits: NDArray[np.float32]
    """The logits of all token ids."""


class EngineAdapter(Protocol):
    """One instance of an engine in a worker process, driven by one thread.

    The worker makes it by ``Class(start)``, where ``start`` is the message ``seer_worker.wire.Start``; an
    ``EngineError`` has the reason if it cannot be made.  From then on the worker calls ``step`` as long as
    chunks are running, and everything else between two steps.  It gives an instance only chunks of the
    weights that are loaded and that are no longer than ``info.max_model_tokens``, and it calls
    ``measure_steps``, ``reset_cache`` and ``update_weights`` only while no chunk is running.  Methods marked
    ``optional`` are for engines that can do more: give memory back, stream, draft, or share KV.

    Each method may raise a ``Rejected`` where its documentation allows it.  Any other exception ends the
    process, and the runtime reports the loss of the instance with its reason.
    """

    info: InstanceInfo
    """What it can hold, and by which weights it answers; complete once the instance has been made."""

    emulated: bool = False
    """Whether it computes no logits, since its tokens are given beforehand; then there is no self-test."""

    def submit(self, job: ChunkJob) -> None:
        """Queue a chunk, which one of the next steps answers; a ``Rejected`` gives it back with the
        reason.
        """
        ...

    def abort(self, job_id: str) -> None:
        """Drop a running chunk without an answer."""
        ...

    def step(self) -> Sequence[Finished | Failed]:
        """Make one step; return the chunks that it ended."""
        ...

    def telemetry(self) -> Telemetry:
        """Return the instance's telemetry; the worker adds how long all steps have taken."""
        ...

    def measure_steps(
        self, batch: Sequence[int], draft_tokens: Sequence[int], context_tokens: int | None
    ) -> StepTimes:
        """Time steps of these sizes, and leave no KV behind; a ``Rejected`` if none of them can be run."""
        ...

    def reset_cache(self) -> None:
        """Forget all cached KV and all drafts; a ``Rejected`` has the reason if it cannot."""
        ...

    def update_weights(self, source: WeightSpec, version: int) -> str | None:
        """Load the weights that ``source`` names and forget all KV; return their fingerprint.

        A ``Rejected`` names what is wrong with them, before anything has changed: that of
        ``seer_worker.weights.checkpoint.open_checked``, which an instance calls first.
        """
        ...

    def watch(self, on: bool) -> Sequence[LogitRow]:
        """Keep the logits of every choice from now on, or no longer; return those kept, in order.

        Only the worker's self-test needs it, before the instance is ready.
        """
        ...

    def close(self) -> None:
        """End the draft source, the store and other processes; the worker's own ends right afterwards."""
        ...

    @optional
    def sleep(self) -> int:
        """Forget all KV, and give back its memory, and that of weights if ``wake`` can restore them.

        Returns the bytes given back, as measured; no chunk is running.  A ``Rejected`` has the reason if it
        cannot.  Without this method the worker resets the cache instead, and reports that nothing was freed.
        While an instance sleeps, the worker refuses chunks and calls on its behalf, ``wake`` excepted.
        """
        return 0

    @optional
    def wake(self) -> None:
        """Take the memory again; the weights are those of before."""
        return

    @optional
    def written(self, job_id: str, start: int) -> tuple[Sequence[int], Sequence[float]]:
        """Return tokens and log-probs of a running chunk, without its first ``start``; there may be none.

        Asked between two steps, of jobs that ``stream``, for a step's end or every few steps.  Tokens are
        those that the chunk's output will have; the worker sends them up to the first whose log-prob is not
        finite, and not again if the instance begins the chunk anew by itself.  Without this method a response
        is streamed chunk by chunk.
        """
        return (), ()

    @optional
    def top_logprobs(self, job_id: str, start: int, end: int) -> TopLogprobs | None:
        """Return the most probable tokens at these places among those that ``written`` has returned.

        Asked of jobs that ``stream`` and whose sampling has ``top_logprobs``.  Without this method they are
        streamed chunk by chunk.
        """
        return None

    @optional
    def end_chunk(self, job_id: str) -> None:
        """End a running chunk with its next token: one of the next steps answers it with what it has.

        Without this method the chunk goes on.
        """
        return

    @optional
    def degradations(self) -> list[Degraded]:
        """Return the failures of the draft source and the KV store since the last call."""
        return []

    @optional
    def forget_group(self, group_id: str) -> None:
        """Drop what drafting and the KV pool remember of a group."""
        return

    @optional
    def push_sibling_tokens(self, text: SiblingTokens) -> None:
        """Give to drafting what a response has written on another instance."""
        return

    @optional
    def receive_pool_message(self, note: Mapping[str, int]) -> None:
        """Hand a note of the KV pool on to the store; see ``seer_worker.process.stores.FailsafeStore``."""
        return

    @optional
    def take_pool_message(self) -> dict[str, int]:
        """Return the store's note to the pool, since the last call."""
        return {}


DRAFTS = ("push_sibling_tokens", "forget_group", "degradations")
"""The methods that an instance with a draft source has to implement."""

SHARES_KV = ("receive_pool_message", "take_pool_message", "forget_group", "degradations")
"""The methods that an instance with a KV store has to implement."""

INSTANCE: ImportedClass[EngineAdapter] = ImportedClass(
    "engine", EngineAdapter, "correct what its plug-in names, or install it"
)
"""Imports an engine's adapter by the name that its plug-in gives."""
