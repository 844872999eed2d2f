"""An ``EngineAdapter`` over what is particular to an engine: its core, and the forward pass behind its
scheduler.

Here is what all adapters would repeat otherwise: results and their accounts, chunks begun anew after
values that are not finite, the draft source, the end of a KV pool, versions of weights, sleep, and meters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf, isfinite
from pathlib import Path
from time import perf_counter
from typing import Protocol

import attrs
import structlog
from msgspec import structs

from seer_core.errors import EngineError
from seer_core.model import InstanceInfo
from seer_core.model.arrays import Logprobs, PromptLogprobs, Tokens, TopLogprobs
from seer_core.model.sampling import StructuredOutputs
from seer_core.ports.drafting import DraftContext, SiblingTokens, SourceSpec, StepTimes
from seer_core.ports.engine import ChunkJob, ChunkOutput
from seer_core.ports.kv import KVStore, StoreContext, StoreSpec
from seer_core.ports.weights import WeightSpec
from seer_worker.process.account import RequestStats
from seer_worker.process.degradation_log import DegradationLog
from seer_worker.process.instance import LogitRow, Rejected
from seer_worker.process.meters import CELL_S, MoveProfiler, Profilable, StepProfiler, start_grid
from seer_worker.process.place import device_kind, node_name
from seer_worker.process.pooling import PooledRequests
from seer_worker.process.stops import StopStrings
from seer_worker.process.stores import STORE
from seer_worker.tokenizer import ModelTokenizer
from seer_worker.wire import Degraded, Failed, Finished, Measured, Start, Telemetry

__all__ = [
    "CoreAdapter",
    "DraftControl",
    "EndedChunk",
    "EngineCore",
    "Forward",
    "ModelForward",
    "ScriptedTokens",
]

log = structlog.get_logger("seer")

NOT_FINITE = (
    "its log-probs are no finite numbers; if that comes again, the model's values are too large for its dtype"
)


@attrs.frozen
class ScriptedTokens:
    """The tokens of a chunk, written down beforehand; ``end`` is the one that ends the response, if any."""

    token_ids: Sequence[int]
    end: int | None


@attrs.frozen
class EndedChunk:
    """A chunk that a step has ended: what it wrote and cost, or in ``failure`` why the engine gave it up.

    ``cached_tokens`` were found in the engine's own cache.
    """

    job_id: str
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    stopped: bool
    cached_tokens: int
    preemptions: int
    account: RequestStats
    failure: str | None = None
    cut_tokens: int = 0
    """The tokens that its last step wrote behind a stop string; they are no longer among its tokens."""
    top_logprobs: TopLogprobs | None = None
    """The most probable tokens at the place of each, where its sampling asks for them."""
    prompt_logprobs: PromptLogprobs | None = None
    """The log-probs of the prompt, where its sampling asks for them and it is the first chunk."""


class DraftControl(Protocol):
    """The drafting of an engine: by a draft source, or by a method of the engine's own."""

    takes_source: bool
    """Whether it is by a source, which has to be attached."""

    def attach(self, spec: SourceSpec, host: DraftContext) -> None:
        """Make the source; ``host.report`` is left for the control to fill in."""
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


class EngineCore(Protocol):
    """The part that an engine's author writes: scheduler, weights and memory, one call each.

    Between two steps, and while no chunk is running for all of it but ``add``, ``drop``, ``end``, ``stop``,
    ``written`` and ``top_logprobs``.
    """

    info: InstanceInfo
    """What it can hold; without what ``Forward.describe`` adds."""
    vocab_size: int
    draft_paths: int
    """Paths of a draft that the engine verifies at once."""

    @property
    def drafts(self) -> DraftControl | None:
        """The drafting of the engine, if it drafts."""
        ...

    def add(self, job: ChunkJob, salt: str, script: ScriptedTokens | None) -> None:
        """Queue a chunk, whose KV is shared under ``salt``; with a script it ends where that ends.

        Raises:
            Rejected: the engine does not take it.
        """
        ...

    def drop(self, job_ids: Sequence[str]) -> None:
        """Drop running chunks."""
        ...

    def end(self, job_id: str) -> None:
        """Let a running chunk end with its next token."""
        ...

    def stop(self, job_id: str) -> EndedChunk:
        """End a running chunk at once; return it with all that it has written."""
        ...

    def step(self) -> Sequence[EndedChunk]:
        """Make one step; return the chunks it ended."""
        ...

    def written(self, job_id: str, start: int) -> tuple[Sequence[int], Sequence[float]]:
        """Return tokens and log-probs of a running chunk, without its first ``start``."""
        ...

    def top_logprobs(self, job_id: str, start: int, end: int) -> TopLogprobs | None:
        """Return the most probable tokens at these places of a running chunk, if it asks for them."""
        ...

    def load(self) -> Telemetry:
        """Return how many chunks run and wait, and the share of KV memory that is in use."""
        ...

    def bench(self) -> Profilable:
        """Return the idle engine for the meters."""
        ...

    def reset_cache(self) -> None:
        """Drop all cached KV; a ``Rejected`` has the reason if it cannot."""
        ...

    def clear_kv(self) -> None:
        """Drop all cached KV, and leave no value in its memory that is not finite."""
        ...

    def kv_block(self) -> tuple[int, int]:
        """Return bytes and tokens of a block as a KV pool keeps it."""
        ...

    def share(self, store: KVStore, report: Callable[[str], None]) -> PooledRequests:
        """Use a store; ``report`` takes the reason if it is given up."""
        ...

    def load_weights(self, source: WeightSpec, version: int) -> str:
        """Load weights, if they are the model's tensors, and check them in the model.

        Returns their fingerprint.  A ``Rejected`` has the reason before anything has changed; an error
        half-way leaves a broken model, is no refusal, and ends the process.
        """
        ...

    def fingerprint(self) -> str:
        """Return what stands for the weights loaded."""
        ...

    def used_bytes(self) -> int:
        """Return the memory in use."""
        ...

    def release(self) -> None:
        """Give memory back; a ``Rejected`` has the reason if it cannot."""
        ...

    def restore(self) -> None:
        """Take the memory again, with KV memory that holds no value that is not finite."""
        ...

    def watch(self, on: bool) -> Sequence[LogitRow]:
        """Keep the logits of every choice from now on, or no longer; return those kept."""
        ...

    def close(self) -> None:
        """End what the engine has started besides this process."""
        ...


class Forward(Protocol):
    """The forward pass behind an engine's scheduler: a model's, or an emulation of one.

    A class that derives from it inherits the methods that do nothing.
    """

    emulated: bool = False
    """Whether its tokens are written down beforehand."""
    clock: Callable[[], float] | None = None
    """Returns seconds as its steps take them; None where that is the machine's own time."""

    def begin_step(self) -> None:
        """Take note that a step begins."""
        return

    def idle(self) -> None:
        """Take note that nothing is left to do until a step begins."""
        return

    def sample(self, job: ChunkJob) -> ScriptedTokens | None:
        """Return what a chunk writes, None if the model will choose; a ``Rejected`` without a script."""
        return None

    def describe(self, info: InstanceInfo) -> InstanceInfo:
        """Return the info with what follows from the model: the weights' fingerprint, or costs."""
        ...

    def measure_moves(self, shares_kv: bool) -> Mapping[str, float]:
        """Return what chunks cost to begin and to move, by the field of ``InstanceInfo``."""
        ...

    def measure_steps(
        self,
        batch: Sequence[int],
        draft_tokens: Sequence[int],
        context_tokens: int | None,
        cell_s: float = inf,
    ) -> StepTimes | None:
        """Return the times of steps, each measured for ``cell_s`` at most; None if no size fits."""
        ...

    def load_weights(self, source: WeightSpec, version: int) -> str:
        """Load weights, as ``EngineCore.load_weights``."""
        ...

    def kv_dropped(self, weight_version: int) -> None:
        """Take note that no KV of before counts, and of which weights the next will be."""
        return

    def release(self) -> int:
        """Give memory back, on an idle engine without KV; return the bytes."""
        ...

    def restore(self) -> None:
        """Take the memory again; an EngineError if the weights are not those of before."""
        return

    def watch(self, on: bool) -> Sequence[LogitRow]:
        """Keep the logits of every choice from now on, or no longer; return those kept."""
        return []

    def telemetry(self, telemetry: Telemetry) -> Telemetry:
        """Return telemetry with what is particular to this forward pass."""
        return telemetry

    def degradations(self) -> list[Degraded]:
        """Return what has gone wrong since the last call."""
        return []

    def close(self) -> None:
        """Take note that the instance ends."""
        return


class ModelForward(Forward):
    """The model of an engine: measured, loaded and put to sleep through its core."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._asleep = ""

    def describe(self, info: InstanceInfo) -> InstanceInfo:
        """Add the fingerprint of the weights."""
        return structs.replace(info, fingerprint=self._core.fingerprint())

    def measure_moves(self, shares_kv: bool) -> Mapping[str, float]:
        """Measure what chunks cost to begin and to move."""
        measured = MoveProfiler(self._core.bench()).measure()
        log.info("moves_measured", **measured)
        return measured

    def measure_steps(
        self,
        batch: Sequence[int],
        draft_tokens: Sequence[int],
        context_tokens: int | None,
        cell_s: float = inf,
    ) -> StepTimes | None:
        """Measure steps, and leave no KV behind."""
        begun_s = perf_counter()
        times = StepProfiler(self._core.bench(), cell_s).measure(batch, draft_tokens, context_tokens)
        self._core.reset_cache()
        log.info("steps_measured", times=times, took_s=round(perf_counter() - begun_s, 1))
        return times

    def load_weights(self, source: WeightSpec, version: int) -> str:
        """Load weights into the model."""
        return self._core.load_weights(source, version)

    def release(self) -> int:
        """Give memory back, and return how much less is in use."""
        self._asleep = self._core.fingerprint()
        before = self._core.used_bytes()
        self._core.release()
        return max(0, before - self._core.used_bytes())

    def restore(self) -> None:
        """Take the memory again, and check that the weights are those of before."""
        self._core.restore()
        if self._core.fingerprint() != self._asleep:
            raise EngineError("it woke with other weights than it fell asleep with")

    def watch(self, on: bool) -> Sequence[LogitRow]:
        """Keep logits, or no longer."""
        return self._core.watch(on)


class CoreAdapter:
    """An engine in this process, and the chunks it is working on.

    Args:
        start: what the runtime asks for.
        core: the engine, idle.
        forward: what computes its steps; by default the core's model.
    """

    def __init__(self, start: Start, core: EngineCore, forward: Forward | None = None) -> None:
        self._core = core
        self._forward = ModelForward(core) if forward is None else forward
        self._jobs: dict[str, ChunkJob] = {}
        self._tokenizer_dir = start.tokenizer_dir
        tokenizer = ModelTokenizer(Path(start.tokenizer_dir), start.trust_remote_code)
        self._stops = StopStrings(tokenizer.decode)
        self._poisoned = False
        self._pool_degradations = DegradationLog("kv_pool")
        self._store: KVStore | None = None
        self._pooled: PooledRequests | None = None
        self.emulated = self._forward.emulated
        self.info = self._forward.describe(core.info)
        self._use_weights(0, self.info.fingerprint)
        if start.store is not None:
            self._share(start.store, start.address)
        device = device_kind()
        known = start.measured
        if self.emulated or known is None or not device or known.device != device:
            known = Measured(device, dict(self._forward.measure_moves(start.store is not None)))
        self.info = structs.replace(self.info, **known.moves)
        if start.source is not None and core.drafts is not None and core.drafts.takes_source:
            times = self._step_times(start.source, known)
            known = structs.replace(known, step_times=times)
            self._attach(start.source, core.drafts, times)
        self.measured = known

    def submit(self, job: ChunkJob) -> None:
        """Queue a chunk."""
        if job.sampling.structured_outputs is not None:
            self._check_grammar(job.sampling.structured_outputs)
        self._core.add(job, self._salt, self._forward.sample(job))
        self._jobs[job.id] = job
        self._stops.open(job)

    def abort(self, job_id: str) -> None:
        """Drop a running chunk."""
        del self._jobs[job_id]
        self._stops.close(job_id)
        self._core.drop([job_id])
        if not self._jobs:
            self._forward.idle()

    def end_chunk(self, job_id: str) -> None:
        """Let a running chunk end with its next token."""
        self._core.end(job_id)

    def step(self) -> list[Finished | Failed]:
        """Make one step; return the chunks it ended."""
        self._forward.begin_step()
        results = [self._finish(ended) for ended in self._stopped(self._core.step())]
        if self._poisoned:
            results += self._cleanse()
        if not self._jobs:
            self._forward.idle()
        return results

    def written(self, job_id: str, start: int) -> tuple[Sequence[int], Sequence[float]]:
        """Return what a running chunk has written, without its first ``start`` tokens."""
        return self._core.written(job_id, start)

    def top_logprobs(self, job_id: str, start: int, end: int) -> TopLogprobs | None:
        """Return the most probable tokens at these places of a running chunk, if it asks for them."""
        return self._core.top_logprobs(job_id, start, end)

    def telemetry(self) -> Telemetry:
        """Return what the engine is doing, and what its drafts cost."""
        telemetry, drafts = self._core.load(), self._core.drafts
        if drafts is not None:
            drafting_s, figures = drafts.report()
            telemetry = structs.replace(telemetry, drafting_s=drafting_s, drafting=figures)
        return self._forward.telemetry(telemetry)

    def degradations(self) -> list[Degraded]:
        """Return what has failed of draft source, KV store and forward pass since the last call."""
        drafting = [] if self._core.drafts is None else self._core.drafts.take_degradations()
        return self._pool_degradations.take() + drafting + self._forward.degradations()

    def push_sibling_tokens(self, text: SiblingTokens) -> None:
        """Hand on to the draft source what a response has written on another instance."""
        if self._core.drafts is not None:
            self._core.drafts.add_sibling_tokens(text)

    def forget_group(self, group_id: str) -> None:
        """Drop what the draft source and the KV pool keep of a group."""
        if self._core.drafts is not None:
            self._core.drafts.forget(group_id)
        if self._pooled is not None:
            self._pooled.forget_group(group_id)

    def receive_pool_message(self, note: Mapping[str, int]) -> None:
        """Hand on a note of the pool to the KV store."""
        if self._pooled is not None:
            self._pooled.store.receive(note)

    def take_pool_message(self) -> dict[str, int]:
        """Return the store's note to the pool."""
        return {} if self._pooled is None else self._pooled.store.take_message()

    def measure_steps(
        self, batch: Sequence[int], draft_tokens: Sequence[int], context_tokens: int | None
    ) -> StepTimes:
        """Measure steps of these sizes; without a drafter, of no draft tokens."""
        lengths = (0,) if self._core.drafts is None else draft_tokens
        times = self._forward.measure_steps(batch, lengths, context_tokens)
        if times is None:
            raise Rejected("it can run no size of this grid")
        return times

    def reset_cache(self) -> None:
        """Drop all cached KV and all drafts."""
        self._forward.begin_step()  # an engine may still make steps of what was dropped
        if self._core.drafts is not None:
            self._core.drafts.reset()
        if self._pooled is not None:
            self._pooled.reset()
        self._core.reset_cache()
        self._forward.kv_dropped(self._weight_version)
        self._forward.idle()

    def update_weights(self, source: WeightSpec, version: int) -> str:
        """Load weights and drop all KV; return their fingerprint.

        An error half-way leaves a broken model: it is no refusal, and ends the process.
        """
        fingerprint = self._forward.load_weights(source, version)
        self._use_weights(version, fingerprint)
        try:
            self.reset_cache()
        except Rejected as error:
            raise EngineError(str(error)) from error
        return fingerprint

    def sleep(self) -> int:
        """Drop all KV and give its memory back, and that of weights if ``wake`` can restore them."""
        self.reset_cache()
        return self._forward.release()

    def wake(self) -> None:
        """Take the memory again; the weights are those of before."""
        self._forward.restore()

    def watch(self, on: bool) -> Sequence[LogitRow]:
        """Keep the logits of every choice from now on, or no longer; return those kept."""
        return self._forward.watch(on)

    def close(self) -> None:
        """End the store, the draft source, and what the engine started; all else goes with the process."""
        self._forward.close()
        if self._pooled is not None:
            self._pooled.close()
        if self._store is not None:
            self._store.close()
        if self._core.drafts is not None:
            self._core.drafts.stop()
        self._core.close()

    def _use_weights(self, version: int, fingerprint: str) -> None:
        self._weight_version = version
        self._salt = f"weights-{version}-{fingerprint}"

    def _step_times(self, source: SourceSpec, known: Measured) -> StepTimes:
        """Return a source's own step times, those that are known, or those measured here."""
        times = source.step_times or known.step_times
        if times is None:
            grid = start_grid(self.info.max_running, source.draft_tokens)
            times = self._forward.measure_steps(*grid, None, CELL_S)
            if times is None:
                raise EngineError("too little KV memory to measure a step: raise kv_cache_bytes")
        return times

    def _attach(self, source: SourceSpec, drafts: DraftControl, times: StepTimes) -> None:
        """Make the draft source."""
        host = DraftContext(
            instance_id=self.info.id,
            max_running=self.info.max_running,
            max_model_tokens=self.info.max_model_tokens,
            vocab_size=self._core.vocab_size,
            draft_tokens=source.draft_tokens,
            step_times=times,
            paths=self._core.draft_paths,
            clock=self._forward.clock,
        )
        drafts.attach(source, host)

    def _share(self, spec: StoreSpec, address: str) -> None:
        """Make this instance's end of the KV pool, and let the engine use it."""
        report = self._pool_degradations.report
        host = StoreContext(self.info.id, *self._core.kv_block(), report, node_name(), address)
        self._store = STORE.make(spec.path, spec.settings, host)
        self._pooled = self._core.share(self._store, report)

    def _check_grammar(self, wanted: StructuredOutputs) -> None:
        from seer_worker.sampling.grammars import grammars_of  # imports torch

        try:
            grammars_of(self._tokenizer_dir, self._core.vocab_size).compile(wanted)
        except ValueError as error:
            raise Rejected(str(error)) from error

    def _stopped(self, ended: Sequence[EndedChunk]) -> Sequence[EndedChunk]:
        """Return the chunks that a step has ended, with those that end at a stop string."""
        read = self._stops.read
        if not read:
            return ended
        found = []
        for chunk in ended:
            start = read.pop(chunk.job_id, None)
            size = None if start is None else self._stops.find(chunk.job_id, chunk.token_ids[start:])
            found.append(chunk if size is None else _cut(chunk, size))
        for job_id, start in read.items():
            size = self._stops.find(job_id, self._core.written(job_id, start)[0])
            if size is not None:
                found.append(_cut(self._core.stop(job_id), size))
        return found

    def _finish(self, ended: EndedChunk) -> Finished | Failed:
        job, account, tokens = self._jobs.pop(ended.job_id), ended.account, ended.token_ids
        self._stops.close(job.id)
        if ended.failure is not None:
            return Failed(job.id, ended.failure)
        if not isfinite(sum(ended.logprobs)):
            self._poisoned = True
            return Failed(job.id, NOT_FINITE)
        return Finished(
            ChunkOutput(
                job_id=job.id,
                token_ids=Tokens(tokens),
                logprobs=Logprobs(ended.logprobs),
                stopped=ended.stopped,
                cached_tokens=ended.cached_tokens,
                prefilled_tokens=len(job.token_ids) - ended.cached_tokens - account.pool_tokens,
                computed_tokens=account.computed_tokens,
                preemptions=ended.preemptions,
                weight_version=self._weight_version,
                steps=len(tokens) + ended.cut_tokens - account.spared_steps,
                drafted_at=account.drafted_at,
                accepted_at=account.accepted_at,
                pool_tokens=account.pool_tokens,
                top_logprobs=ended.top_logprobs,
                prompt_logprobs=ended.prompt_logprobs,
            )
        )

    def _cleanse(self) -> list[Failed]:
        """Clear KV memory after values that are not finite, which masks and zeros do not stop.

        What is running begins its chunk anew, and comes to the same tokens; what cannot is returned.
        """
        self._poisoned = False
        jobs, self._jobs = self._jobs, {}
        self._core.drop(list(jobs))
        for job_id in jobs:
            self._stops.close(job_id)
        self._core.clear_kv()
        failed = []
        for job in jobs.values():
            try:
                self.submit(job)
            except Rejected as rejection:
                failed.append(Failed(job.id, str(rejection)))
        return failed


def _cut(chunk: EndedChunk, size: int) -> EndedChunk:
    """Return a chunk that ends with the last of its first ``size`` tokens."""
    return attrs.evolve(
        chunk,
        token_ids=chunk.token_ids[:size],
        logprobs=chunk.logprobs[:size],
        stopped=True,
        cut_tokens=len(chunk.token_ids) - size,
        top_logprobs=None if chunk.top_logprobs is None else chunk.top_logprobs[:size],
    )
