"""One instance between the wire and its engine, wherever a launcher has started it.

What all engines would repeat otherwise is here: the checks of chunks and calls, results and their accounts,
stop strings, chunks begun anew after values that are not finite, the draft source, the end of a KV pool,
versions of weights, and sleep.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, isfinite
from pathlib import Path
from time import perf_counter
from typing import Any

import structlog
from msgspec import structs
from seer_host.frames import WireError
from seer_host.images import IMAGES

from seer_core.errors import EngineError
from seer_core.model.sampling import StructuredOutputs
from seer_core.ports.contracts import implemented
from seer_core.ports.drafting import DraftContext, StepTimes
from seer_core.ports.engine import ChunkJob
from seer_core.ports.kv import KVStore, StoreContext
from seer_core.ports.weights import WeightSpec
from seer_worker.process.adapter import EndedChunk, EngineAdapter, Rejected
from seer_worker.process.degradation_log import DegradationLog
from seer_worker.process.meters import CELL_S, start_grid
from seer_worker.process.place import device_kind, node_name
from seer_worker.process.probe import probe_machine
from seer_worker.process.stops import StopStrings
from seer_worker.process.stores import STORE
from seer_worker.process.streams import Streams
from seer_worker.tokenizer import ModelTokenizer
from seer_worker.wire import (
    AbortChunk,
    AddSiblingTokens,
    Called,
    ControlCall,
    Degraded,
    DropImages,
    EndChunkEarly,
    Failed,
    Finished,
    ForgetGroup,
    HoldImage,
    Link,
    Measured,
    MeasureSteps,
    PoolMessage,
    ProbeMachine,
    ReadTokenizer,
    ResetCache,
    Shutdown,
    Sleep,
    Start,
    Submit,
    ToWorker,
    UpdateWeights,
    Wake,
)

__all__ = ["Worker"]

log = structlog.get_logger("seer")

ASLEEP = "it is asleep; wake it first"
NOT_FINITE = (
    "its log-probs are no finite numbers; if that comes again, the model's values are too large for its dtype"
)
REPORT_INTERVAL_S = 0.2
"""Telemetry is sent at most this often, and once when falling idle."""


class Worker:
    """Drives an engine: chunks in, answers out, and control calls only while it is idle.

    Its messages go to ``send``, in order; ``clock`` returns the seconds that steps take.

    Raises:
        EngineError: the engine cannot draft or share KV as ``start`` asks for.
    """

    def __init__(
        self,
        send: Callable[..., None],
        adapter: EngineAdapter,
        start: Start,
        clock: Callable[[], float] = perf_counter,
        report_interval_s: float = REPORT_INTERVAL_S,
    ) -> None:
        self.adapter = adapter
        self.info = adapter.info
        self.measured: Measured | None = start.measured
        """What the instance has measured of itself, for others like it."""
        self._send = send
        self._clock = clock
        self._report_interval_s = report_interval_s
        self._next_report_s = -inf
        self._stepping_s = 0.0
        self._jobs: dict[str, ChunkJob] = {}
        self._ending: set[str] = set()
        """The running chunks that are to end on demand."""
        self._end_chunk = implemented(adapter, "end_chunk") or (lambda job_id: None)
        self._streams = Streams(adapter)
        self._idle = implemented(adapter, "idle")
        self._tokenizer_dir = start.tokenizer_dir
        self._stops = StopStrings(ModelTokenizer(Path(start.tokenizer_dir), start.trust_remote_code).decode)
        self._poisoned = self._asleep = False
        self._asleep_with = ""
        self._use_weights(0, self.info.fingerprint)
        self._drafts = getattr(adapter, "drafts", None)
        self._pool_degradations = DegradationLog("kv_pool")
        self._store: KVStore | None = None
        self._pooled = None
        if start.store is not None:
            self._pooled = self._ability("share_kv", "a KV store")(
                lambda *block: self._open_store(start, *block), self._pool_degradations.report
            )
        self._measure_moves()
        if start.source is not None:
            if self._drafts is None:
                raise EngineError(f"{type(adapter).__name__} took a draft source, and has no drafts")
            if self._drafts.takes_source:
                self._attach(start)

    @property
    def busy(self) -> bool:
        """Whether chunks are running."""
        return bool(self._jobs)

    def serve(self, link: Link) -> None:
        """Take messages and step until the runtime sends ``Shutdown``.

        Raises:
            RuntimeGoneError: the connection to it has ended.
            WireError: it sent something that is no message, or none for a worker.
        """
        while True:
            for message in link.receive(wait=not self.busy):
                if isinstance(message, Shutdown):
                    return
                self.handle(message)
            if self.busy:
                self.step()

    def handle(self, message: ToWorker) -> None:
        """Pass a message on to the engine; a control call is answered at once."""
        match message:
            case Submit(job):
                self._take(job)
            case AbortChunk(job_id):
                if job_id in self._jobs:
                    self._forget(job_id)
                    self.adapter.abort([job_id])
                    self._note_idle()
                    if not self._jobs:  # no step follows, which would report it
                        self._report(self._clock())
            case EndChunkEarly(job_id):
                if job_id in self._jobs:
                    self._ending.add(job_id)
                    self._end_chunk(job_id)
            case AddSiblingTokens(text):
                if self._drafts is not None:
                    self._drafts.add_sibling_tokens(text)
            case ForgetGroup(group_id):
                if self._drafts is not None:
                    self._drafts.forget(group_id)
                if self._pooled is not None:
                    self._pooled.forget_group(group_id)
            case HoldImage(digest, data):
                if hold_image := implemented(self.adapter, "hold_image"):
                    hold_image(digest, data)
            case DropImages(digests):
                if drop_images := implemented(self.adapter, "drop_images"):
                    drop_images(digests)
            case PoolMessage(note):
                if self._pooled is not None:
                    self._pooled.store.receive(note)
            case ResetCache() | UpdateWeights() | Sleep() | Wake() | MeasureSteps() | ProbeMachine():
                self._send(self._call(message))
            case Start() | ReadTokenizer():
                raise WireError(f"a second {type(message).__name__} has arrived; a worker takes one")
            case Shutdown():
                raise WireError("Shutdown has arrived where a step was due; it ends the worker")

    def submit(self, job: ChunkJob) -> None:
        """Queue a chunk; a ``Rejected`` gives it back."""
        if job.sampling.structured_outputs is not None:
            self._check_grammar(job.sampling.structured_outputs)
        if IMAGES in job.attachments and implemented(self.adapter, "hold_image") is None:
            raise Rejected("this engine takes no images")
        self.adapter.submit(job, self._salt)
        self._jobs[job.id] = job
        self._stops.open(job)

    def advance(self) -> list[Finished | Failed]:
        """Make a step; return the chunks that it ended."""
        results = [self._finish(ended) for ended in self._stopped(self.adapter.step())]
        if self._poisoned:
            results += self._cleanse()
        self._note_idle()
        return results

    def step(self) -> None:
        """Make a step, and send its results."""
        begun_s = self._clock()
        results = self.advance()
        now_s = self._clock()
        self._stepping_s += now_s - begun_s
        for result in results:
            self._streams.close(result.job_id if isinstance(result, Failed) else result.output.job_id)
        self._report(now_s, results)

    def _report(self, now_s: float, results: Sequence[Finished | Failed] = ()) -> None:
        """Send results, and what else is due."""
        report = not self._jobs or now_s >= self._next_report_s
        telemetry = []
        if report:
            found = structs.replace(self.adapter.telemetry(), stepping_s=self._stepping_s)
            if self._drafts is not None:
                drafting_s, figures = self._drafts.report()
                found = structs.replace(found, drafting_s=drafting_s, drafting=figures)
            telemetry.append(found)
            self._next_report_s = now_s + self._report_interval_s
        # Troubles and counts first: the rollout may be over, and summed up, with the last result.
        notes = self.notes() if results or report else []
        self._send(*notes, *self._streams.grown(now_s), *results, *telemetry)

    def notes(self) -> list[Degraded | PoolMessage]:
        """Return what has failed since the last call, and the store's message to the pool."""
        degradations = self._pool_degradations.take()
        if self._drafts is not None:
            degradations += self._drafts.take_degradations()
        if further := implemented(self.adapter, "degradations"):
            degradations += further()
        note = {} if self._pooled is None else self._pooled.store.take_message()
        return [*degradations, *([PoolMessage(note)] if note else [])]

    def reset_cache(self) -> None:
        """Drop all cached KV and all drafts."""
        if self._drafts is not None:
            self._drafts.reset()
        if self._pooled is not None:
            self._pooled.reset()
        self.adapter.reset_cache()

    def close(self) -> None:
        """End the store, the draft source, and what the engine started; all else goes with the process."""
        if self._pooled is not None:
            self._pooled.close()
        if self._store is not None:
            self._store.close()
        if self._drafts is not None:
            self._drafts.stop()
        self.adapter.close()

    def _take(self, job: ChunkJob) -> None:
        tokens, limit = len(job.token_ids) + job.max_tokens, self.info.max_model_tokens
        try:
            if self._asleep:
                raise Rejected(ASLEEP)
            if job.weight_version != self._weight_version:
                wanted, loaded = job.weight_version, self._weight_version
                raise Rejected(f"the chunk wants weight version {wanted}, loaded is {loaded}")
            if tokens > limit:
                raise Rejected(f"the chunk needs {tokens} tokens, max_model_tokens is {limit}")
            self.submit(job)
        except Rejected as rejection:
            self._send(Failed(job.id, str(rejection)))
        else:
            self._streams.open(job)

    def _call(self, message: ControlCall) -> Called:
        if self._jobs:
            return Called(f"{len(self._jobs)} chunks are running")
        if self._asleep and not isinstance(message, Sleep | Wake):
            return Called(ASLEEP)
        try:
            match message:
                case ResetCache():
                    self.reset_cache()
                    return Called()
                case MeasureSteps(batch, draft_tokens, context_tokens):
                    lengths = (0,) if self._drafts is None else draft_tokens
                    return Called(step_times=self._measure_steps(batch, lengths, context_tokens))
                case ProbeMachine():
                    return Called(probe=probe_machine())
                case UpdateWeights(source, version):
                    return Called(fingerprint=self._update_weights(source, version))
                case Sleep():
                    return Called(freed_bytes=self._sleep())
                case Wake():
                    self._wake()
                    return Called()
        except Rejected as rejection:
            return Called(str(rejection))

    def _update_weights(self, source: WeightSpec, version: int) -> str | None:
        fingerprint = self.adapter.update_weights(source, version)
        self._use_weights(version, fingerprint or "")
        try:
            self.reset_cache()
        except Rejected as error:
            raise EngineError(str(error)) from error
        return fingerprint

    def _use_weights(self, version: int, fingerprint: str) -> None:
        self._weight_version = version
        self._salt = f"weights-{version}-{fingerprint}-{self.info.kv_kind}"

    def _sleep(self) -> int:
        if self._asleep:
            return 0
        self.reset_cache()
        self._asleep_with = self._fingerprint()
        sleep = implemented(self.adapter, "sleep")
        freed_bytes: int = 0 if sleep is None else sleep()
        self._asleep = True
        return freed_bytes

    def _wake(self) -> None:
        if self._asleep and (wake := implemented(self.adapter, "wake")):
            wake()
            if self._fingerprint() != self._asleep_with:
                raise EngineError("it woke with other weights than it fell asleep with")
        self._asleep = False

    def _fingerprint(self) -> str:
        fingerprint = implemented(self.adapter, "fingerprint")
        return "" if fingerprint is None else str(fingerprint())

    def _measure_steps(
        self, batch: Sequence[int], draft_tokens: Sequence[int], context_tokens: int | None
    ) -> StepTimes:
        meters = implemented(self.adapter, "meters")
        if meters is None:
            raise Rejected("this engine does not measure its steps")
        times: StepTimes | None = meters().steps(batch, draft_tokens, context_tokens, inf)
        if times is None:
            raise Rejected("it can run no size of this grid")
        return times

    def _measure_moves(self) -> None:
        """Add to the info what chunks cost, as measured here or by another instance like this one."""
        meters = implemented(self.adapter, "meters")
        if meters is None:
            return
        device, known = device_kind(), self.measured
        emulated = getattr(self.adapter, "emulated", False)
        if emulated or known is None or not device or known.device != device:
            known = Measured(device, dict(meters().moves()))
        self.info = structs.replace(self.info, **known.moves)
        self.measured = known

    def _attach(self, start: Start) -> None:
        """Make the draft source, with its own step times, those that are known, or those measured here."""
        source, drafts, known = start.source, self._drafts, self.measured
        assert source is not None
        assert drafts is not None
        times = source.step_times or (None if known is None else known.step_times)
        if times is None:
            grid = start_grid(self.info.max_running, source.draft_tokens)
            times = self._ability("meters", "a draft source")().steps(*grid, None, CELL_S)
            if times is None:
                raise EngineError("too little KV memory to measure a step: raise kv_cache_bytes")
        if known is not None:
            self.measured = structs.replace(known, step_times=times)
        host = DraftContext(
            instance_id=self.info.id,
            max_running=self.info.max_running,
            max_model_tokens=self.info.max_model_tokens,
            vocab_size=self.adapter.vocab_size,
            draft_tokens=source.draft_tokens,
            step_times=times,
            paths=drafts.paths,
            clock=getattr(self.adapter, "clock", None),
        )
        drafts.attach(source, host)

    def _open_store(self, start: Start, block_bytes: int, block_tokens: int) -> KVStore:
        """Make this instance's end of the KV pool."""
        assert start.store is not None
        host = StoreContext(
            self.info.id,
            block_bytes,
            block_tokens,
            self._pool_degradations.report,
            node_name(),
            start.address,
        )
        self._store = STORE.make(start.store.path, start.store.settings, host)
        return self._store

    def _ability(self, name: str, given: str) -> Callable[..., Any]:
        """Return an optional method of the engine, which it needs for what it was given."""
        method = implemented(self.adapter, name)
        if method is None:
            raise EngineError(
                f"{type(self.adapter).__name__} took {given}, and lacks {name} of"
                " seer_worker.process.adapter.EngineAdapter"
            )
        return method

    def _check_grammar(self, wanted: StructuredOutputs) -> None:
        try:
            from seer_worker.sampling.grammars import grammars_of  # imports torch

            grammars_of(self._tokenizer_dir, self.adapter.vocab_size).compile(wanted)
        except ValueError as error:
            raise Rejected(str(error)) from error
        except Exception as error:  # of libraries that are not here, or cannot read this tokenizer
            flaw = f"{type(error).__name__}: {error}"
            raise Rejected(f"this engine follows no structured_outputs: {flaw}") from error

    def _stopped(self, ended: Sequence[EndedChunk]) -> Sequence[EndedChunk]:
        """Return the chunks that a step has ended, with those that end at a stop string."""
        read = self._stops.read
        if not read:
            return ended
        found = []
        for chunk in ended:
            start = read.pop(chunk.job_id, None)
            size = None if start is None else self._stops.find(chunk.job_id, chunk.token_ids[start:])
            found.append(chunk if size is None else chunk.cut(size))
        for job_id, start in read.items():
            size = self._stops.find(job_id, self.adapter.written(job_id, start)[0])
            if size is not None:
                found.append(self.adapter.stop_chunk(job_id).cut(size))
        return found

    def _finish(self, ended: EndedChunk) -> Finished | Failed:
        job = self._jobs.pop(ended.job_id)
        self._ending.discard(job.id)
        self._stops.close(job.id)
        if ended.failure is not None:
            return Failed(job.id, ended.failure)
        if not isfinite(sum(ended.logprobs)):
            self._poisoned = True
            return Failed(job.id, NOT_FINITE)
        return Finished(ended.output(job, self._weight_version))

    def _cleanse(self) -> list[Failed]:
        """Clear KV memory after values that are not finite, which masks and zeros do not stop.

        What is running begins its chunk anew, and comes to the same tokens; what cannot is returned.
        """
        self._poisoned = False
        jobs, self._jobs = self._jobs, {}
        self.adapter.abort(list(jobs))
        for job_id in jobs:
            self._stops.close(job_id)
        (implemented(self.adapter, "clear_kv") or self.adapter.reset_cache)()
        failed = []
        for job in jobs.values():
            try:
                self.submit(job)
            except Rejected as rejection:
                self._ending.discard(job.id)
                failed.append(Failed(job.id, str(rejection)))
            else:
                if job.id in self._ending:
                    self._end_chunk(job.id)
        return failed

    def _forget(self, job_id: str) -> None:
        del self._jobs[job_id]
        self._ending.discard(job_id)
        self._stops.close(job_id)
        self._streams.close(job_id)

    def _note_idle(self) -> None:
        if not self._jobs and self._idle is not None:
            self._idle()
