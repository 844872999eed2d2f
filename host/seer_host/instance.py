"""What an engine's author writes: one instance of the engine, as its worker process drives it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from seer_core.drafting import SiblingText, StepTimes
from seer_core.errors import EngineError
from seer_core.model import InstanceInfo
from seer_core.ports import ChunkJob
from seer_core.weights import WeightSpec
from seer_host.loader import Kind
from seer_host.wire import Failed, Finished, Telemetry, Troubled

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = [
    "INSTANCE",
    "DraftingInstance",
    "Instance",
    "PoolingInstance",
    "Refusal",
    "Row",
    "Scripted",
    "Sleeper",
    "StreamingInstance",
]


class Refusal(EngineError):
    """An instance will not do what it was asked for; nothing has changed, and it goes on."""


class Row(NamedTuple):
    """The logits from which a request with this seed got its token at this position, float32 [vocab].

    The position counts the tokens before it, prompt included.
    """

    seed: int
    position: int
    logits: NDArray[np.float32]


class Instance(Protocol):
    """One instance of an engine in a worker process, driven by one thread.

    The worker makes it by ``Class(start)``, where ``start`` is the message ``seer_host.wire.Start``; an
    ``EngineError`` tells why it cannot be made.  From then on the worker calls ``step`` as long as chunks are
    running, and everything else between two steps.  It gives an instance only chunks of the weights that are
    loaded and that are no longer than ``info.max_model_tokens``, and it calls ``measure_steps``,
    ``reset_cache`` and ``update_weights`` only while no chunk is running.  An instance that can give memory
    back is a ``Sleeper`` besides, one that can tell what a running chunk has written a ``StreamingInstance``.

    Each method may raise a ``Refusal`` where its documentation says so.  Any other exception ends the
    process, and the runtime learns that the instance is lost and why.
    """

    info: InstanceInfo
    """What it can hold, and by which weights it answers; complete once the instance has been made."""

    def submit(self, job: ChunkJob) -> None:
        """Queue a chunk, which one of the next steps answers; a ``Refusal`` gives it back with the reason."""
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
        """Time steps of these sizes, and leave no KV behind; a ``Refusal`` if none of them can be run."""
        ...

    def reset_cache(self) -> None:
        """Forget all cached KV and all drafts; a ``Refusal`` says why not."""
        ...

    def update_weights(self, source: WeightSpec, version: int) -> str | None:
        """Load the weights that ``source`` names and forget all KV; return their fingerprint.

        A ``Refusal`` names what is wrong with them, before anything has changed: that of
        ``seer_host.checkpoint.open_checked``, which an instance calls first.
        """
        ...

    def watch(self, on: bool) -> Sequence[Row]:
        """Keep the logits of every choice from now on, or no longer; return those kept, in order.

        Only the worker's self-test asks for it, before the instance is ready.
        """
        ...

    def close(self) -> None:
        """End the draft source, the store and other processes; the worker's own ends right afterwards."""
        ...


class Helped(Protocol):
    """What an ``Instance`` has besides if a draft source or a KV store helps it."""

    def troubles(self) -> list[Troubled]:
        """Return what the draft source and the KV store complain of, since this was last asked."""
        ...

    def forget_group(self, group_id: str) -> None:
        """Drop what drafting and the KV pool remember of a group."""
        ...


@runtime_checkable
class Sleeper(Protocol):
    """What an ``Instance`` has besides if its engine can give memory back; the worker looks for it.

    An instance without these methods sleeps as well: the worker resets its cache and says that this freed
    nothing.  While one sleeps, the worker refuses chunks and calls on its behalf, ``wake`` excepted.
    """

    def sleep(self) -> int:
        """Forget all KV, and give back its memory, and that of weights if ``wake`` can restore them.

        Returns the bytes given back, as measured; no chunk is running.  A ``Refusal`` says why not.
        """
        ...

    def wake(self) -> None:
        """Take the memory again; the weights are those of before."""
        ...


@runtime_checkable
class StreamingInstance(Protocol):
    """What an ``Instance`` has besides if it can tell what a running chunk has written; the worker looks.

    Without it, responses that somebody reads while they are written come at the ends of their chunks.
    """

    def written(self, job_id: str, start: int) -> tuple[Sequence[int], Sequence[float]]:
        """Return tokens and log-probs of a running chunk, without its first ``start``; there may be none.

        Asked between two steps, of jobs that ``stream``, for a step's end or every few steps.  Tokens are
        those that the chunk's output will have; the worker tells them up to the first whose log-prob is not
        finite, and not again if the instance begins the chunk anew by itself.
        """
        ...


@runtime_checkable
class Scripted(Protocol):
    """What an ``Instance`` has besides if it computes no logits: its tokens are written down beforehand.

    The self-test, which recomputes choices from logits, is not asked of it.
    """

    scripted: bool


@runtime_checkable
class DraftingInstance(Helped, Protocol):
    """What an ``Instance`` that drafts has besides."""

    def teach(self, text: SiblingText) -> None:
        """Let drafting know what a response has written on another instance."""
        ...


@runtime_checkable
class PoolingInstance(Helped, Protocol):
    """What an ``Instance`` that shares KV has besides; ``seer_host.stores.Guarded`` knows both answers."""

    def pool_told(self, note: Mapping[str, int]) -> None:
        """Hand on to the KV store what the pool has told."""
        ...

    def pool_note(self) -> dict[str, int]:
        """Return what the store has to tell the pool, since this was last asked."""
        ...


INSTANCE: Kind[Instance] = Kind("engine", Instance, "correct what its plug-in names, or install it")
