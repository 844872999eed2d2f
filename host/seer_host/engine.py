"""The Engine port over a worker process."""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

import attrs
import msgspec

from seer_core.drafting import Drafter, SiblingText, StepTimes
from seer_core.errors import EngineError
from seer_core.events import InstanceReported, InstanceTroubled
from seer_core.kv import KVPool, WiredPool
from seer_core.model import InstanceInfo
from seer_core.ports import ChunkJob, EngineSink
from seer_core.reading import flaw
from seer_core.weights import WeightSpec, directory
from seer_host.launcher import Launcher, RunningWorker
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
    PoolNote,
    Ready,
    ResetCache,
    Sleep,
    Start,
    Submit,
    Teach,
    Telemetry,
    Troubled,
    UpdateWeights,
    Wake,
    WireError,
)

__all__ = ["Launch", "WorkerEngine"]

LOSS_GRACE_S = 2.0
LONGEST_TURN_S = 1.0
"""A wait for the worker is cut into turns, so that one in which the event loop was blocked is known."""


@attrs.frozen
class Launch:
    """How an instance is started, and how long it may take for what.

    ``launcher`` decides where its worker runs, with exactly this ``environment``, under ``interpreter``:
    another one than this process has, where the engine lives in another environment, which then has
    ``seer_host`` too.  ``instance`` is the import path of its class, an ``Instance``, and ``settings`` plain
    data for it.  ``own_methods`` are the engine's methods of drafting, each ``<engine>:<method>``.
    ``cannot_draft`` and ``cannot_share_kv`` say why this instance cannot; with ``ignores_kv_pool`` its engine
    knows no pool, which is no error.  ``silence_timeout_s`` bounds how long it may send nothing while it has
    chunks.  ``model`` stands for the model's files.
    """

    instance: str
    settings: Mapping[str, Any]
    environment: Mapping[str, str]
    launcher: Launcher
    start_timeout_s: float
    stop_timeout_s: float
    control_timeout_s: float
    silence_timeout_s: float
    interpreter: str = sys.executable
    own_methods: tuple[str, ...] = ()
    cannot_draft: str | None = None
    cannot_share_kv: str | None = None
    ignores_kv_pool: bool = False
    model: str = ""


class WorkerEngine:
    """One instance of an engine in a worker process of its own."""

    def __init__(self, id: str, launch: Launch, labels: Mapping[str, str] | None = None) -> None:
        self.id = id
        self._launch = launch
        self._labels = dict(labels or {})
        self._drafter: Drafter | None = None
        self._shares_text = False
        self._kv_pool: KVPool | None = None
        self._wired: WiredPool | None = None
        self._worker: RunningWorker | None = None
        self._listener: asyncio.Task[None] | None = None
        self._calls: deque[asyncio.Future[Called]] = deque()
        self._chunks: set[str] = set()
        self._busy_since_s = 0.0
        self._troubled = False

    @property
    def worker(self) -> RunningWorker | None:
        """The worker; None while it is down."""
        return self._worker

    def draft_with(self, drafter: Drafter | None) -> bool:
        """Speculate with this drafter, or not at all, from the next ``start`` on; return whether it shares.

        Raises:
            EngineError: its engine does not draft.
        """
        if drafter is not None and self._launch.cannot_draft is not None:
            raise EngineError(f"instance {self.id!r} {self._launch.cannot_draft}")
        self._drafter = drafter
        self._shares_text = drafter is not None and drafter.shares()
        return self._shares_text

    def share_kv(self, pool: KVPool | None) -> bool:
        """Share KV through this pool, or with nobody, from the next ``start`` on; return whether it will.

        Raises:
            EngineError: it cannot as it is configured.
        """
        if pool is not None and self._launch.cannot_share_kv is not None:
            raise EngineError(f"instance {self.id!r} {self._launch.cannot_share_kv}")
        self._kv_pool = None if self._launch.ignores_kv_pool else pool
        return self._kv_pool is not None

    async def start(self, sink: EngineSink) -> InstanceInfo:
        """Start the worker and load the model, as weight version 0; end an older worker first.

        Raises:
            EngineError: it died while loading, or took longer than ``start_timeout_s``.
        """
        await self.stop()
        self._chunks.clear()
        self._wired = self._kv_pool if isinstance(self._kv_pool, WiredPool) else None
        launch = self._launch
        try:
            worker = await launch.launcher.launch(self.id, launch.interpreter, launch.environment)
        except OSError as error:
            raise EngineError(
                f"instance {self.id!r} did not start: {launch.interpreter} cannot be run: {flaw(error)};"
                " correct `python` in its engine's table"
            ) from error
        self._worker = worker
        try:
            source = None if self._drafter is None else self._drafter.source()
            store = None if self._kv_pool is None else self._kv_pool.store(self.id)
            worker.send(
                Start(
                    launch.instance,
                    self.id,
                    dict(launch.settings),
                    worker.scratch,
                    source,
                    store,
                    launch.own_methods,
                )
            )
            async with asyncio.timeout(launch.start_timeout_s):
                info = await self._ready(worker, sink)
        except (EOFError, WireError, TimeoutError) as error:
            self._troubled = True
            how = await worker.end(LOSS_GRACE_S if isinstance(error, EOFError) else 0)
            if isinstance(error, WireError):
                how = f"its worker and it do not understand each other: {error}"
            elif isinstance(error, TimeoutError):
                how = f"not ready after start_timeout_s = {launch.start_timeout_s:g}"
            self._worker = None
            raise EngineError(f"instance {self.id!r} did not start: {how}\n{worker.last_words()}") from error
        except BaseException:
            await worker.end()
            self._worker = None
            raise
        if self._wired is not None:
            self._wired.connect(self.id, self._tell_store)
        self._listener = asyncio.create_task(self._listen(worker, sink))
        return msgspec.structs.replace(info, labels=self._labels, model=launch.model)

    def submit(self, job: ChunkJob) -> None:
        """Queue a chunk; on an instance just lost it is void with the others."""
        if self._worker is not None:
            if not self._chunks:
                self._busy_since_s = monotonic()
            self._chunks.add(job.id)
            self._worker.send(Submit(job))

    def abort(self, job_id: str) -> None:
        """Drop a chunk."""
        self._chunks.discard(job_id)
        if self._worker is not None:
            self._worker.send(Abort(job_id))

    def teach(self, text: SiblingText) -> None:
        """Let drafting know what a response has written on another instance."""
        if self._worker is not None and self._shares_text:
            self._worker.send(Teach(text))

    def forget_group(self, group_id: str) -> None:
        """Drop what drafting and the KV pool remember of a group."""
        if self._worker is not None and not (self._drafter is None and self._kv_pool is None):
            self._worker.send(ForgetGroup(group_id))

    async def measure_steps(
        self, batch: Sequence[int], draft_tokens: Sequence[int], context_tokens: int | None = None
    ) -> StepTimes:
        """Measure the duration of decoding steps on this grid; without a drafter, of 0 draft tokens only.

        Raises:
            EngineError: the instance is busy or down, or can run no size of the grid.
        """
        answer = await self._call(MeasureSteps(tuple(batch), tuple(draft_tokens), context_tokens))
        assert answer.step_times is not None
        return answer.step_times

    async def reset_cache(self) -> None:
        """Forget all cached KV and all drafts; an EngineError if the instance is busy or down."""
        await self._call(ResetCache())

    async def update_weights(self, source: WeightSpec, version: int) -> str | None:
        """Load what ``source`` names as weight version ``version``.

        Raises:
            EngineError: the instance is down, chunks are running, or the source does not hold the model's
                tensors, finite and of their shapes: then nothing has changed.  Or a layer does not answer by
                what was loaded: then the instance ends.
        """
        if source.directory is not None:  # the worker may be at home elsewhere
            source = directory(Path(source.directory).absolute())
        answer = await self._call(UpdateWeights(source, version))
        return answer.fingerprint

    async def sleep(self) -> int:
        """Give memory back until ``wake``; return the bytes, 0 from an engine that is no ``Sleeper``.

        Raises:
            EngineError: the instance is busy or down, or refuses.
        """
        return (await self._call(Sleep())).freed_bytes

    async def wake(self) -> None:
        """Take the memory again; an EngineError if the instance is down."""
        await self._call(Wake())

    async def stop(self) -> None:
        """End the worker and all it started, within ``stop_timeout_s`` and a few seconds more."""
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.cancel()
            with suppress(asyncio.CancelledError):
                await listener
        worker, self._worker = self._worker, None
        if worker is not None:
            self._fail_calls("it was stopped")
            await worker.end(self._launch.stop_timeout_s)
            if not self._troubled:
                worker.discard_log()

    async def _ready(self, worker: RunningWorker, sink: EngineSink) -> InstanceInfo:
        """Pass on what the worker says until it is ready, and return what it can hold."""
        info = None
        while info is None:
            for message in await worker.receive():
                if isinstance(message, Ready):
                    info = message.info
                else:
                    self._dispatch(message, sink, worker.log)
        return info

    async def _listen(self, worker: RunningWorker, sink: EngineSink) -> None:
        """Pass on what the worker says, until it is gone; then say so, once."""
        try:
            while True:
                for message in await self._hear(worker):
                    self._dispatch(message, sink, worker.log)
        except EOFError:
            reason = await worker.end(LOSS_GRACE_S)
        except WireError as error:
            await worker.end()
            reason = f"its worker spoke nonsense: {error}"
        except TimeoutError:
            await worker.end()
            silence_s, chunks = self._launch.silence_timeout_s, len(self._chunks)
            reason = f"silent for silence_timeout_s = {silence_s:g} with {chunks} chunks"
        self._troubled = True
        self._worker = self._listener = None
        self._fail_calls(reason)
        sink.lost(self.id, reason)

    async def _hear(self, worker: RunningWorker) -> list[FromWorker]:
        """Wait for the next messages.

        Only time in which the worker has chunks, and in which this loop would have heard it, is silence: a
        turn that took longer than it should is not counted, for somebody blocked the loop, and what the
        worker sent meanwhile is read next.

        Raises:
            TimeoutError: the worker has sent no byte for ``silence_timeout_s``.
        """
        silence_s = self._launch.silence_timeout_s
        turn_s = min(LONGEST_TURN_S, silence_s / 4)
        silent_s = 0.0
        while True:
            begun_s, received = monotonic(), worker.received_bytes
            try:
                # Not wait_for: on Python 3.11 it can swallow the cancellation that ``stop`` relies on.
                async with asyncio.timeout(turn_s if silent_s < silence_s else 0):
                    return await worker.receive()
            except TimeoutError:
                if not self._chunks or worker.received_bytes != received:
                    silent_s = 0.0
                elif silent_s >= silence_s:
                    raise
                elif monotonic() - begun_s < 2 * turn_s:
                    silent_s += monotonic() - max(begun_s, self._busy_since_s)

    def _dispatch(self, message: FromWorker, sink: EngineSink, log: str) -> None:
        match message:
            case Finished(output):
                self._chunks.discard(output.job_id)
                sink.chunk_finished(self.id, output)
            case Failed(job_id, reason):
                self._chunks.discard(job_id)
                sink.chunk_failed(self.id, job_id, reason)
            case Grown(piece):
                sink.chunk_grew(self.id, piece)
            case Telemetry():
                sink.reported(InstanceReported(self.id, **msgspec.structs.asdict(message)))
            case PoolNote(note):
                self._tell_pool(note, sink, log)
            case Troubled(what, reason):
                self._troubled = True
                sink.troubled(InstanceTroubled(self.id, what, reason, log))
            case Called():
                call = self._calls.popleft()
                if not call.done():
                    call.set_result(message)

    def _tell_pool(self, note: Mapping[str, int], sink: EngineSink, log: str) -> None:
        """Hand on what the store has told; a pool that raises is told no more until the next start."""
        if self._wired is not None:
            try:
                self._wired.told(self.id, note)
            except Exception as error:
                self._wired = None
                reason = f"the KV pool failed: {type(error).__name__}: {error}"
                sink.troubled(InstanceTroubled(self.id, "kv_pool", reason, log))

    def _tell_store(self, note: Mapping[str, int]) -> None:
        if self._worker is not None:
            self._worker.send(PoolNote(dict(note)))

    async def _call(self, message: ControlCall) -> Called:
        """Send a control message and wait for its answer; answers come in order."""
        name = type(message).__name__
        if self._worker is None:
            raise EngineError(f"{name} on instance {self.id!r}: it is not running")
        call: asyncio.Future[Called] = asyncio.get_running_loop().create_future()
        self._calls.append(call)
        self._worker.send(message)
        try:
            async with asyncio.timeout(self._launch.control_timeout_s):
                answer = await call
        except TimeoutError as error:
            # It may obey yet, with weights that nobody takes it to have; so it is lost.
            if self._worker is not None and self._listener is not None:
                listener = self._listener
                await self._worker.end()
                await asyncio.wait({listener})  # it tells of the loss first
            raise EngineError(
                f"{name} on instance {self.id!r}: no answer after {self._launch.control_timeout_s:g} s;"
                " the instance was ended"
            ) from error
        if answer.refusal is not None:
            raise EngineError(f"{name} on instance {self.id!r}: {answer.refusal}")
        return answer

    def _fail_calls(self, reason: str) -> None:
        while self._calls:
            call = self._calls.popleft()
            if not call.done():
                call.set_result(Called(reason))
