"""Paced instances on a virtual clock, vLLM's all in this process: exact, repeatable, nobody waits.

A step is computed at the moment when it begins, and told when it ends, so much later as it takes.  What
arrives meanwhile takes effect between two steps, as with a worker that reads its socket there.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec
from seer_host.wire import (
    Abort,
    Called,
    ControlCall,
    Failed,
    Finished,
    ForgetGroup,
    FromWorker,
    Grown,
    MeasureSteps,
    ResetCache,
    Sleep,
    Start,
    Submit,
    Teach,
    Telemetry,
    ToWorker,
    Troubled,
    UpdateWeights,
    Wake,
)
from seer_sim.clock import VirtualClock

from seer_core.drafting import Drafter, SiblingText, StepTimes
from seer_core.errors import EngineError
from seer_core.events import InstanceReported, InstanceTroubled
from seer_core.kv import KVPool, WiredPool
from seer_core.model import InstanceInfo
from seer_core.ports import ChunkJob, EngineSink
from seer_core.weights import WeightSpec
from seer_paced.script import Script
from seer_paced.settings import Settings

if TYPE_CHECKING:
    from seer_paced.lockstep import RemoteStepper
    from seer_paced.stepper import Stepper, Turned

__all__ = ["CANNOT_DRAFT", "INSTANCES", "VirtualEngine"]

INSTANCES = {
    "vllm": "seer_paced.instance:PacedInstance",
    "sglang": "seer_paced.sglang_instance:PacedSglang",
}
CANNOT_DRAFT = (
    "does not draft on SGLang's scheduler: take the drafter out of [seer].plugins, or write"
    ' scheduler = "vllm" in [engine.paced]'
)
HERE = "in the runtime's process"


class VirtualEngine:
    """The Engine port over an instance in this process.

    ``sglang`` is the interpreter that has SGLang, if that schedules: in a process of its own, which takes
    turns with this one.  ``first_steps_s`` says when the first step of each request here began.
    """

    def __init__(
        self,
        id: str,
        clock: VirtualClock,
        settings: Settings,
        labels: Mapping[str, str],
        script: Script,
        sglang: str | None = None,
    ) -> None:
        self.id = id
        self.first_steps_s: dict[str, float] = {}
        self.steps = 0
        self._clock = clock
        self._settings = settings
        self._labels = dict(labels)
        self._script = script
        self._sglang = sglang
        self._drafter: Drafter | None = None
        self._kv_pool: KVPool | None = None
        self._lost = False
        self._not_before_s = 0.0
        self._sink: EngineSink | None = None
        self._stepper: Stepper | RemoteStepper | None = None
        self._scratch: str | None = None
        self._clear()

    def _clear(self) -> None:
        self._up = False
        self._inbox: list[ToWorker] = []
        self._results: Sequence[FromWorker] = ()
        self._chunks: set[str] = set()
        self._cancel_timer: Callable[[], None] | None = None

    def draft_with(self, drafter: Drafter | None) -> bool:
        """Speculate with this drafter, or not at all, from the next ``start`` on; say whether it shares.

        Raises:
            EngineError: SGLang schedules.
        """
        if drafter is not None and self._sglang is not None:
            raise EngineError(f"instance {self.id!r} {CANNOT_DRAFT}")
        self._drafter = drafter
        return drafter is not None and drafter.shares()

    def share_kv(self, pool: KVPool | None) -> bool:
        """Share KV through this pool, or with nobody, from the next ``start`` on; return whether it will.

        Raises:
            EngineError: the pool talks to its stores by wire, of which there is none here.
        """
        if isinstance(pool, WiredPool):
            raise EngineError(
                f"instance {self.id!r} is on a virtual clock and has no wire to its pool; set"
                ' kv_pool = "local"'
            )
        self._kv_pool = pool
        return pool is not None

    async def start(self, sink: EngineSink) -> InstanceInfo:
        """Make the instance, which takes some seconds of this process and none of the clock."""
        await self.stop()
        if self._not_before_s > self._clock.now():
            await self._clock.sleep_until(self._not_before_s)
        self._lost = False
        self._scratch = tempfile.mkdtemp(prefix="seer-paced-")
        start = Start(
            INSTANCES[self._settings.scheduler],
            self.id,
            msgspec.to_builtins(self._settings),
            self._scratch,
            None if self._drafter is None else self._drafter.source(),
            None if self._kv_pool is None else self._kv_pool.store(self.id),
        )
        self._stepper = self._make(start) if self._sglang is None else self._call_for(start, self._sglang)
        self._up = True
        self._sink = sink
        return msgspec.structs.replace(self._stepper.info, labels=self._labels)

    def submit(self, job: ChunkJob) -> None:
        """Queue a chunk; on an instance just lost it is void with the others."""
        if not self._up:
            if self._lost:
                return
            raise EngineError(f"instance {self.id!r} has not started; it cannot take chunk {job.id!r}")
        self._chunks.add(job.id)
        self._post(Submit(job))

    def abort(self, job_id: str) -> None:
        """Drop a chunk, at the end of the current step if it is running."""
        self._chunks.discard(job_id)
        self._post(Abort(job_id))

    def teach(self, text: SiblingText) -> None:
        """Let drafting know what a response has written on another instance."""
        if self._drafter is not None:
            self._post(Teach(text))

    def forget_group(self, group_id: str) -> None:
        """Drop what drafting and the KV pool remember of a group."""
        if not (self._drafter is None and self._kv_pool is None):
            self._post(ForgetGroup(group_id))

    async def measure_steps(
        self, batch: Sequence[int], draft_tokens: Sequence[int], context_tokens: int | None = None
    ) -> StepTimes:
        """Return what the cost model says, at no cost in time."""
        answer = self._call(MeasureSteps(tuple(batch), tuple(draft_tokens), context_tokens))
        assert answer.step_times is not None
        return answer.step_times

    async def reset_cache(self) -> None:
        """Forget all cached KV and all drafts, at no cost in time."""
        self._call(ResetCache())

    async def update_weights(self, source: WeightSpec, version: int) -> str | None:
        """Take the version, at no cost in time, and forget all KV; ``source`` is not read."""
        return self._call(UpdateWeights(source, version)).fingerprint

    async def sleep(self) -> int:
        """Forget all KV, at no cost in time; return the bytes that it stands for."""
        return self._call(Sleep()).freed_bytes

    async def wake(self) -> None:
        """Be awake, at no cost in time."""
        self._call(Wake())

    async def stop(self) -> None:
        """Drop everything, without a word to the sink."""
        if self._cancel_timer is not None:
            self._cancel_timer()
        self._clear()
        self._sink = None
        stepper, self._stepper = self._stepper, None
        scratch, self._scratch = self._scratch, None
        if stepper is not None:
            stepper.close()
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)

    def kill(self, reason: str, down_s: float = 0.0) -> None:
        """Die now if alive, and refuse to be up again within ``down_s``."""
        sink = self._sink
        if sink is None:
            return
        if self._cancel_timer is not None:
            self._cancel_timer()
        self._clear()
        self._sink = None
        self._lost = True
        self._not_before_s = self._clock.now() + down_s
        sink.lost(self.id, reason)
        self._clock.settle()

    def _make(self, start: Start) -> Stepper:
        """Make an instance of vLLM here."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what vLLM warns of itself
            from seer_paced.instance import PacedInstance
            from seer_paced.stepper import Stepper

            interval_s = self._settings.report_interval_s
            return Stepper(lambda pace: PacedInstance(start, pace, self._script), interval_s)

    def _call_for(self, start: Start, python: str) -> RemoteStepper:
        """Let an instance of SGLang be made elsewhere."""
        from seer_sglang.plugin import worker_environment

        from seer_paced.lockstep import RemoteStepper
        from seer_paced.sglang_nursery import nursery

        settings = self._settings
        found = nursery(python, worker_environment(os.environ, 1, ""))
        connection = found.connect()
        limits_s = settings.start_timeout_s, settings.silence_timeout_s
        try:
            return RemoteStepper(connection, start, self._script, *limits_s)
        except EngineError as error:
            connection.close()
            raise EngineError(
                f"instance {self.id!r} did not start: {error}; the last words of SGLang's process:"
                f" {found.last_words() or 'none'}; `make setup-sglang` puts its environment right"
            ) from error

    def _post(self, message: ToWorker) -> None:
        if not self._up:
            return
        self._inbox.append(message)
        if self._cancel_timer is None:
            self._begin_later()

    def _begin_later(self) -> None:
        """Begin a step after everything else that happens at this instant."""
        self._cancel_timer = self._clock.call_at(self._clock.now(), self._begin, last=True)

    def _begin(self) -> None:
        self._cancel_timer = None
        now_s = self._clock.now()
        try:
            turned = self._turn(step=True)
        except Exception as error:
            self.kill(f"{type(error).__name__}: {error}")
            return
        if turned.results is not None:
            self.steps += 1
            for request_id in turned.admitted:
                self.first_steps_s.setdefault(request_id, now_s)
            self._results = turned.results
            self._cancel_timer = self._clock.call_at(now_s + turned.step_s, self._end)
        self._tell(turned.answers)

    def _end(self) -> None:
        self._begin_later()
        results, self._results = self._results, ()
        self._tell(results)

    def _turn(self, *, step: bool) -> Turned:
        inbox, self._inbox = self._inbox, []
        assert self._stepper is not None
        return self._stepper.turn(self._clock.now(), inbox, step=step)

    def _tell(self, messages: Sequence[FromWorker]) -> None:
        """Pass on what the worker has said."""
        sink = self._sink
        assert sink is not None
        for message in messages:
            match message:
                case Finished(output) if output.job_id in self._chunks:
                    self._chunks.discard(output.job_id)
                    sink.chunk_finished(self.id, output)
                case Failed(job_id, reason) if job_id in self._chunks:
                    self._chunks.discard(job_id)
                    sink.chunk_failed(self.id, job_id, reason)
                case Grown(piece) if piece.job_id in self._chunks:
                    sink.chunk_grew(self.id, piece)
                case Telemetry():
                    sink.reported(InstanceReported(self.id, **msgspec.structs.asdict(message)))
                case Troubled(what, reason):
                    sink.troubled(InstanceTroubled(self.id, what, reason, HERE))
                case _:
                    pass

    def _call(self, message: ControlCall) -> Called:
        """Let the worker obey at once, if it is idle."""
        name = type(message).__name__
        if not self._up:
            raise EngineError(f"{name} on instance {self.id!r}: it is not running")
        if self._chunks:
            raise EngineError(f"{name} on instance {self.id!r}: {len(self._chunks)} chunks are running")
        self._inbox.append(message)
        [answer] = [each for each in self._turn(step=False).answers if isinstance(each, Called)]
        if answer.refusal is not None:
            raise EngineError(f"{name} on instance {self.id!r}: {answer.refusal}")
        return answer
