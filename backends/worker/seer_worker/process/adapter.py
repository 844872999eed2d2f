"""The contract of an engine's author: one instance of the engine, as its worker drives it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import attrs
from seer_host.routed_experts import ROUTED_EXPERTS, shortened

from seer_core.errors import EngineError
from seer_core.model import InstanceInfo
from seer_core.model.arrays import Logprobs, PromptLogprobs, Tokens, TopLogprobs
from seer_core.ports.contracts import optional
from seer_core.ports.drafting import DraftContext, SiblingTokens, SourceSpec, StepTimes
from seer_core.ports.engine import ChunkJob, ChunkOutput
from seer_core.ports.kv import KVStore
from seer_core.ports.weights import WeightSpec
from seer_worker.process.account import RequestStats
from seer_worker.process.loader import ImportedClass
from seer_worker.sampling.logit_row import LogitRow
from seer_worker.wire import Degraded, Telemetry

if TYPE_CHECKING:
    from seer_worker.process.pooling import PooledRequests

__all__ = [
    "ADAPTER",
    "DraftControl",
    "EndedChunk",
    "EngineAdapter",
    "LogitRow",
    "Meters",
    "Rejected",
    "ScriptedTokens",
]


class Rejected(EngineError):
    """An instance will not do as it was asked; nothing has changed, and it goes on.

    Remedy: change the call as the message says.
    """


@attrs.frozen
class EndedChunk:
    """A chunk that has ended: what it wrote and cost, or in ``failure`` why the engine gave it up."""

    job_id: str
    token_ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    stopped: bool = False
    """Whether the response ends with it, by a token that ends responses or a stop string."""
    cached_tokens: int = 0
    """Tokens whose KV was found in the engine's own cache."""
    preemptions: int = 0
    account: RequestStats | None = None
    """What it cost; None: each token that was not cached was computed once, and nothing was drafted."""
    failure: str | None = None
    cut_tokens: int = 0
    """The tokens that its last step wrote behind a stop string; they are no longer among its tokens."""
    top_logprobs: TopLogprobs | None = None
    """The most probable tokens at the place of each, where its sampling asks for them."""
    prompt_logprobs: PromptLogprobs | None = None
    """The log-probs of the prompt, where its sampling asks for them and it is the first chunk."""
    attachments: Mapping[str, Any] = attrs.Factory(dict)
    """What the engine answers beside that, for the user."""

    def cut(self, size: int) -> EndedChunk:
        """Return it as it is if it ends with the last of its first ``size`` tokens."""
        cut_tokens, attachments = len(self.token_ids) - size, self.attachments
        if cut_tokens and ROUTED_EXPERTS in attachments:  # as a turn's, they stand beside those of the next
            experts = shortened(attachments[ROUTED_EXPERTS], cut_tokens)
            attachments = {**attachments, ROUTED_EXPERTS: experts}
        return attrs.evolve(
            self,
            token_ids=self.token_ids[:size],
            logprobs=self.logprobs[:size],
            stopped=True,
            cut_tokens=cut_tokens,
            top_logprobs=None if self.top_logprobs is None else self.top_logprobs[:size],
            attachments=attachments,
        )

    def output(self, job: ChunkJob, weight_version: int) -> ChunkOutput:
        """Return the answer to its job."""
        size, tokens = len(job.token_ids), self.token_ids
        account = self.account or RequestStats(size - self.cached_tokens + len(tokens) - 1)
        return ChunkOutput(
            job_id=job.id,
            token_ids=Tokens(tokens),
            logprobs=Logprobs(self.logprobs),
            stopped=self.stopped,
            cached_tokens=self.cached_tokens,
            prefilled_tokens=size - self.cached_tokens - account.pool_tokens,
            computed_tokens=account.computed_tokens,
            preemptions=self.preemptions,
            weight_version=weight_version,
            steps=len(tokens) + self.cut_tokens - account.spared_steps,
            drafted_at=account.drafted_at,
            accepted_at=account.accepted_at,
            pool_tokens=account.pool_tokens,
            top_logprobs=self.top_logprobs,
            prompt_logprobs=self.prompt_logprobs,
            attachments=dict(self.attachments),
        )


@attrs.frozen
class ScriptedTokens:
    """The tokens of a chunk, written down beforehand; ``end`` is the one that ends the response, if any."""

    token_ids: Sequence[int]
    end: int | None


class DraftControl(Protocol):
    """The drafting of an engine: by a draft source, or by a method of the engine's own."""

    takes_source: bool
    """Whether it is by a source, which has to be attached."""
    paths: int
    """Paths of a draft that the engine verifies at once."""

    def attach(self, spec: SourceSpec, host: DraftContext) -> None:
        """Make the source; the control itself fills in how it reports failures."""
        ...

    def add_sibling_tokens(self, text: SiblingTokens) -> None:
        """Hand on what a response has written on another instance."""
        ...

    def forget(self, group_id: str) -> None:
        """Drop what is kept of a group."""
        ...

    def reset(self) -> None:
        """Drop all drafts."""
        ...

    def report(self) -> tuple[float, dict[str, float]]:
        """Return the seconds spent on drafts, and the source's figures."""
        ...

    def take_degradations(self) -> list[Degraded]:
        """Return what has failed since the last call."""
        ...

    def stop(self) -> None:
        """End what the source has started."""
        ...


class Meters(Protocol):
    """Measures an idle engine, and leaves no KV behind."""

    def steps(
        self,
        batch: Sequence[int],
        draft_tokens: Sequence[int],
        context_tokens: int | None,
        cell_s: float,
    ) -> StepTimes | None:
        """Time steps of these sizes for ``cell_s`` each at most; None if none fits."""
        ...

    def moves(self) -> Mapping[str, float]:
        """Return what chunks cost to begin and to move, by the field of ``InstanceInfo``."""
        ...


class EngineAdapter(Protocol):
    """One instance of an engine in a worker process, driven by one thread.

    The worker makes it by ``Class(start)``, where ``start`` is the message ``seer_worker.wire.Start``; an
    ``EngineError`` has the reason if it cannot be made.  From then on the worker calls ``step`` as long as
    chunks are running, and everything else between two steps.  It gives an instance only chunks of the
    weights that are loaded and that are no longer than ``info.max_model_tokens``, and it calls all methods
    but ``submit``, ``abort``, ``step``, ``telemetry`` and those about running chunks only while none is
    running.  Methods marked ``optional``, and attributes with a value, are for engines that can do more.

    Each method may raise a ``Rejected`` where its documentation allows it.  Any other exception ends the
    process, and the runtime reports the loss of the instance with its reason.
    """

    info: InstanceInfo
    """What it can hold, and by which weights it answers; complete once the instance has been made."""
    vocab_size: int = 0
    """The number of token ids, for engines that draft or have structured outputs."""
    drafts: DraftControl | None = None
    """The drafting of an engine that drafts, if its ``start`` has a source."""
    emulated: bool = False
    """Whether it computes no logits, since its tokens are given beforehand; then there is no self-test."""
    clock: Callable[[], float] | None = None
    """Returns seconds as its steps take them; None where that is the machine's own time."""

    def submit(self, job: ChunkJob, salt: str) -> None:
        """Queue a chunk, which one of the next steps ends; a ``Rejected`` gives it back with the reason.

        KV may be shared between chunks of the same ``salt``, which stands for the weights and the kind of KV.
        """
        ...

    def abort(self, job_ids: Sequence[str]) -> None:
        """Drop running chunks."""
        ...

    def step(self) -> Sequence[EndedChunk]:
        """Make one step; return the chunks that it ended."""
        ...

    def telemetry(self) -> Telemetry:
        """Return how many chunks run and wait, and the share of KV in use; the worker adds the rest."""
        ...

    def reset_cache(self) -> None:
        """Forget all cached KV; a ``Rejected`` has the reason if it cannot."""
        ...

    def update_weights(self, source: WeightSpec, version: int) -> str | None:
        """Load the weights that ``source`` names; return their fingerprint.  ``reset_cache`` follows.

        A ``Rejected`` names what is wrong with them, before anything has changed: that of
        ``seer_worker.weights.checkpoint.open_checked``, which an instance calls first.  An error half-way
        leaves a broken model, is no refusal, and ends the process.
        """
        ...

    def watch(self, on: bool) -> Sequence[LogitRow]:
        """Keep the logits of every choice from now on, or no longer; return those kept, in order.

        Only the worker's self-test needs it, before the instance is ready.
        """
        ...

    def close(self) -> None:
        """End other processes that it has started; the worker's own ends right afterwards."""
        ...

    @optional
    def hold_image(self, digest: str, data: bytes) -> None:
        """Hold the file of an image.

        Chunks with images follow: the attachment ``images`` has digest, offset and length of each, and at
        these places among ``token_ids`` are the tokens that stand for it.  Without this method such chunks
        are refused.
        """
        return

    @optional
    def drop_images(self, digests: Sequence[str]) -> None:
        """Forget images that no running chunk needs."""
        return

    @optional
    def written(self, job_id: str, start: int) -> tuple[Sequence[int], Sequence[float]]:
        """Return tokens and log-probs of a running chunk, without its first ``start``; there may be none.

        Asked between two steps, of jobs that ``stream``, for a step's end or every few steps, and of those
        with stop strings.  Tokens are those that the chunk's output will have; the worker sends them up to
        the first whose log-prob is not finite, and not again if the chunk is begun anew.  Without this method
        a response is streamed chunk by chunk.
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
        """End a running chunk with its next token: one of the next steps ends it with what it has.

        Without this method the chunk goes on.
        """
        return

    @optional
    def stop_chunk(self, job_id: str) -> EndedChunk:
        """End a running chunk at once, and return it with all that it has written, ``stopped``.

        Needed, with ``written``, by engines that have stop strings.
        """
        raise NotImplementedError

    @optional
    def idle(self) -> None:
        """Take note that no chunk is left."""
        return

    @optional
    def clear_kv(self) -> None:
        """Drop all cached KV, and leave no value in its memory that is not finite.

        Called after a chunk has ended with log-probs that are not.  Without this method the cache is reset.
        """
        return

    @optional
    def sleep(self) -> int:
        """Give back the memory of KV, all of which is dropped, and that of weights if ``wake`` can restore
        them.

        Returns the bytes given back, as measured.  A ``Rejected`` has the reason if it cannot.  Without this
        method only the cache is reset.  While an instance sleeps, the worker refuses chunks and calls on its
        behalf, ``wake`` excepted.
        """
        return 0

    @optional
    def wake(self) -> None:
        """Take the memory again; the weights are those of before."""
        return

    @optional
    def fingerprint(self) -> str:
        """Return what stands for the weights in the model now: must be after ``wake`` what it was before."""
        return ""

    @optional
    def meters(self) -> Meters:
        """Return what measures the idle engine, ``seer_worker.process.meters.BenchMeters`` for instance."""
        raise NotImplementedError

    @optional
    def share_kv(
        self, open_store: Callable[[int, int], KVStore], report: Callable[[str], None]
    ) -> PooledRequests:
        """Share KV through the store that ``open_store`` returns for the bytes and tokens of a block.

        ``report`` takes the reason if the store is given up.
        """
        raise NotImplementedError

    @optional
    def degradations(self) -> list[Degraded]:
        """Return what else has failed since the last call, and it works on without."""
        return []


ADAPTER: ImportedClass[EngineAdapter] = ImportedClass(
    "engine", EngineAdapter, "correct what its plug-in names, or install it"
)
"""Imports an engine's adapter by the name that its plug-in gives."""
