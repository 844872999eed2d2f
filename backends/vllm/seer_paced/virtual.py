"""Paced instances on a virtual clock, all in this process: exact, repeatable, nobody waits.

A step is computed at the moment when it begins, and told when it ends, so much later as it takes.  What
arrives meanwhile takes effect between two steps, as with a worker that reads its socket there.
"""

from __future__ import annotations

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
    from seer_host.worker import Worker

    from seer_paced.instance import PacedInstance

__all__ = ["VirtualEngine"]

INSTANCE = "seer_paced.instance:PacedInstance"
HERE = "in the runtime's process"


class VirtualEngine:
    """The Engine port over an instance in this process.

    ``first_steps_s`` says when the first step of each request here began.
    """

    def __init__(
        self,
        id: str,
        clock: VirtualClock,
        settings: Settings,
        labels: Mapping[str, str],
        script: Script | None = None,
    ) -> None:
        self.id = id
        self.first_steps_s: dict[str, float] = {}
        self.steps = 0
        self._clock = clock
        self._settings = settings
        self._labels = dict(labels)
        self._script = script
        self._drafter: Drafter | None = None
        self._kv_pool: KVPool | None = None
        self._lost = False
        self._not_before_s = 0.0
        self._sink: EngineSink | None = None
        self._instance: PacedInstance | None = None
        self._scratch: str | None = None
        self._clear()

    def _clear(self) -> None:
        self._worker: Worker | None = None
        self._inbox: list[ToWorker] = []
        self._outbox: list[FromWorker] = []
        self._chunks: set[str] = set()
        self._cancel_timer: Callable[[], None] | None = None

    def draft_with(self, drafter: Drafter | None) -> bool:
        """Speculate with this drafter, or not at all, from the next ``start`` on; say whether it shares."""
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
            INSTANCE,
            self.id,
            msgspec.to_builtins(self._settings),
            self._scratch,
            None if self._drafter is None else self._drafter.source(),
            None if self._kv_pool is None else self._kv_pool.store(self.id),
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what vLLM warns of itself
            from seer_host.worker import Worker

            from seer_paced.instance import PacedInstance
            from seer_paced.pace import VirtualPace

            self._pace = VirtualPace(self._clock)
            self._instance = instance = PacedInstance(start, self._pace, self._script)
        self._worker = Worker(self._send, instance, self._pace.now, self._settings.report_interval_s)
        self._sink = sink
        return msgspec.structs.replace(instance.info, labels=self._labels)

    def submit(self, job: ChunkJob) -> None:
        """Queue a chunk; on an instance just lost it is void with the others."""
        if self._worker is None:
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
        instance, self._instance = self._instance, None
        scratch, self._scratch = self._scratch, None
        if instance is not None:
            instance.close()
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

    def _send(self, *messages: FromWorker) -> None:
        self._outbox += messages

    def _post(self, message: ToWorker) -> None:
        if self._worker is None:
            return
        self._inbox.append(message)
        if self._cancel_timer is None:
            self._begin_later()

    def _begin_later(self) -> None:
        """Begin a step after everything else that happens at this instant."""
        self._cancel_timer = self._clock.call_at(self._clock.now(), self._begin, last=True)

    def _begin(self) -> None:
        self._cancel_timer = None
        worker, instance = self._worker, self._instance
        assert worker is not None
        assert instance is not None
        try:
            self._take()
            self._tell()
            if not worker.busy:
                return
            worker.step()
        except Exception as error:
            self.kill(f"{type(error).__name__}: {error}")
            return
        self.steps += 1
        now_s, took_s = self._clock.now(), self._pace.step_s
        for request_id in instance.admitted:
            self.first_steps_s.setdefault(request_id, now_s)
        self._pace.begin()
        self._cancel_timer = self._clock.call_at(now_s + took_s, self._end)

    def _end(self) -> None:
        self._begin_later()
        self._tell()

    def _take(self) -> None:
        inbox, self._inbox = self._inbox, []
        assert self._worker is not None
        for message in inbox:
            self._worker.obey(message)

    def _tell(self) -> None:
        """Pass on what the worker has said."""
        outbox, self._outbox = self._outbox, []
        sink = self._sink
        assert sink is not None
        for message in outbox:
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
        if self._worker is None:
            raise EngineError(f"{name} on instance {self.id!r}: it is not running")
        if self._chunks:
            raise EngineError(f"{name} on instance {self.id!r}: {len(self._chunks)} chunks are running")
        self._take()
        self._worker.obey(message)
        [answer] = [each for each in self._outbox if isinstance(each, Called)]
        self._outbox.remove(answer)
        if answer.refusal is not None:
            raise EngineError(f"{name} on instance {self.id!r}: {answer.refusal}")
        return answer
