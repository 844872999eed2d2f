"""An instance over a worker, wherever that runs and however its messages get there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import msgspec
from seer_host.images import PlacedImages
from seer_host.json_files import describe_flaw
from seer_host.launcher import RunningWorker
from seer_host.machine_probe import MachineProbe

from seer_core.error_origin import fact_of
from seer_core.errors import EngineError, PromptError
from seer_core.model import InstanceInfo
from seer_core.model.events import InstanceDegraded, InstanceReported
from seer_core.ports.contracts import implemented
from seer_core.ports.drafting import Drafter, SiblingTokens, StepTimes
from seer_core.ports.engine import ChunkJob, InstanceSink
from seer_core.ports.kv import KVPool
from seer_core.ports.weights import WeightSpec
from seer_worker.client.digest import digest_of
from seer_worker.client.images import HeldImages, read_all
from seer_worker.seer_version import seer_version
from seer_worker.wire import (
    AbortChunk,
    AddSiblingTokens,
    Called,
    ControlCall,
    Degraded,
    EndChunkEarly,
    Failed,
    Finished,
    ForgetGroup,
    FromWorker,
    MeasureSteps,
    PoolMessage,
    ProbeMachine,
    ResetCache,
    Sleep,
    Start,
    Streamed,
    Submit,
    Telemetry,
    ToWorker,
    UpdateWeights,
    Wake,
)

__all__ = ["InstanceSpec", "WorkerClient"]


@attrs.frozen
class InstanceSpec:
    """The description of an instance, wherever its worker runs.

    ``instance`` is the import path of its class, or of a function that makes it, and ``settings`` plain data
    for it.  ``own_methods`` are the engine's methods of drafting, each ``<engine>:<method>``.
    ``cannot_draft`` and ``cannot_wire`` (a pool that exchanges notes with its stores) are the reason why this
    instance cannot; with ``ignores_kv_pool`` its engine shares no KV, which is no error.  With
    ``keeps_adapters`` adapters stay beside the model, and need not be merged with it.  ``model`` stands
    for the model's files; ``model_dir`` is where a worker must have the same ones, empty for no check.
    ``tokenizer_dir`` has its tokenizer, if there is one, which may run code of the directory if
    ``trust_remote_code``; ``end_tokens`` returns the tokens that end a response.
    """

    instance: str
    settings: Mapping[str, Any]
    own_methods: tuple[str, ...] = attrs.field(default=(), kw_only=True)
    cannot_draft: str | None = attrs.field(default=None, kw_only=True)
    cannot_wire: str | None = attrs.field(default=None, kw_only=True)
    ignores_kv_pool: bool = attrs.field(default=False, kw_only=True)
    keeps_adapters: bool = attrs.field(default=False, kw_only=True)
    model: str = attrs.field(default="", kw_only=True)
    model_dir: str = attrs.field(default="", kw_only=True)
    tokenizer_dir: str = attrs.field(default="", kw_only=True)
    trust_remote_code: bool = attrs.field(default=False, kw_only=True)
    end_tokens: Callable[[], tuple[int, ...]] = attrs.field(default=tuple, kw_only=True)


class WorkerClient:
    """One instance of an engine, as the runtime has it.

    A class that derives from it starts the worker and carries its messages: it overrides the methods that
    raise ``NotImplementedError``, and calls ``_receive`` and ``_lost``.
    """

    worker: RunningWorker | None = None
    """The worker's process; None while it is down, or if it has none of its own."""

    def __init__(self, id: str, spec: InstanceSpec, labels: Mapping[str, str] | None = None) -> None:
        self.id = id
        self.spec = spec
        self._chunks: set[str] = set()
        """The chunks that the worker has not answered."""
        self._images = HeldImages()
        self._unsent: dict[str, bool] = {}
        """Chunks that wait for the files of their images, and whether each is to end with one token."""
        self._reading: asyncio.Task[None] | None = None
        """What reads the files of the last of them."""
        self._whole: WeightSpec | None = None
        """The last whole weights since the start, with which an adapter is merged."""
        self._labels = dict(labels or {})
        self._drafter: Drafter | None = None
        self._shares_text = False
        self._kv_pool: KVPool | None = None
        self._wired: KVPool | None = None
        self._sink: InstanceSink | None = None
        self._up = False

    @property
    def _sent(self) -> int:
        """How many chunks the worker has."""
        return len(self._chunks) - len(self._unsent)

    @property
    def log(self) -> str:
        """Where the worker's log is: a path, or a sentence."""
        raise NotImplementedError

    def set_drafter(self, drafter: Drafter | None) -> bool:
        """Speculate with this drafter, or not at all, from the next ``start`` on; return whether it shares.

        Raises:
            EngineError: its engine does not draft.
        """
        rejection = self.spec.cannot_draft
        if drafter is not None and rejection is not None:
            raise EngineError(f"instance {self.id!r} {rejection}")
        self._drafter = drafter
        self._shares_text = drafter is not None and drafter.shares()
        return self._shares_text

    def set_kv_pool(self, pool: KVPool | None) -> bool:
        """Share KV through this pool, or not at all, from the next ``start`` on; return whether it will.

        Raises:
            EngineError: it cannot as it is configured.
        """
        spec = self.spec
        if spec.cannot_wire is not None and implemented(pool, "connect") is not None:
            raise EngineError(f"instance {self.id!r} {spec.cannot_wire}")
        self._kv_pool = None if spec.ignores_kv_pool else pool
        return self._kv_pool is not None

    async def start(self, sink: InstanceSink) -> InstanceInfo:
        """Start the worker and load the model, as weight version 0; end an older worker first.

        Raises:
            EngineError: it died while loading, or took too long.
        """
        await self.stop()
        self._wired = self._kv_pool if implemented(self._kv_pool, "connect") is not None else None
        self._sink = sink
        spec = self.spec
        start = Start(
            spec.instance,
            self.id,
            dict(spec.settings),
            "",
            None if self._drafter is None else self._drafter.source(),
            None if self._kv_pool is None else self._kv_pool.store(self.id),
            spec.own_methods,
            seer_version(),
            spec.model_dir,
            await asyncio.to_thread(_digest_now, spec.model_dir),
            spec.tokenizer_dir,
            spec.trust_remote_code,
            await asyncio.to_thread(spec.end_tokens),
        )
        self._whole = None
        info = await self._open(start)
        self._up = True
        if self._wired is not None:
            self._wired.connect(self.id, self._send_note)
        return msgspec.structs.replace(
            info, labels=self._labels, model=spec.model, end_token_ids=start.end_token_ids
        )

    def submit(self, job: ChunkJob) -> None:
        """Queue a chunk; on an instance just lost it is void with the others."""
        if not self._up:
            return
        self._chunks.add(job.id)
        waits = self._unsent and isinstance(job.attachments, PlacedImages)
        if waits or self._images.unread(job.attachments):
            self._unsent[job.id] = False
            sending = self._send_when_read(job, self._reading)
            self._reading = asyncio.get_running_loop().create_task(sending)
        else:
            self._send_chunk(job, {})

    async def _send_when_read(self, job: ChunkJob, before: asyncio.Task[None] | None) -> None:
        """Read the files of a chunk's images beside the event loop, after those of the chunk ``before``."""
        if before is not None:
            await asyncio.wait([before])
        flaw, read = "", {}
        try:
            if job.id in self._unsent:
                read = await asyncio.to_thread(read_all, self._images.unread(job.attachments))
        except PromptError as error:
            flaw = str(error)
        except Exception as error:  # such as no memory for it
            flaw = f"its images cannot be read: {fact_of(error)}"
        ends = self._unsent.pop(job.id, None)
        if ends is None:  # dropped, or the worker is gone
            return
        if flaw:
            self._receive(Failed(job.id, flaw))
            return
        self._send_chunk(job, read)
        if ends:
            self._send(EndChunkEarly(job.id))

    def _send_chunk(self, job: ChunkJob, read: Mapping[str, bytes]) -> None:
        for message in self._images.open(job.id, job.attachments, read):
            self._send(message)
        self._send(Submit(job))

    def abort(self, job_id: str) -> None:
        """Drop a chunk."""
        self._over(job_id)
        if self._unsent.pop(job_id, None) is None:
            self._send(AbortChunk(job_id))

    def end_chunk(self, job_id: str) -> None:
        """End a chunk with its next token, if the engine can."""
        if job_id in self._unsent:
            self._unsent[job_id] = True
        else:
            self._send(EndChunkEarly(job_id))

    def add_sibling_tokens(self, text: SiblingTokens) -> None:
        """Send the drafter what a response has written on another instance."""
        if self._shares_text:
            self._send(AddSiblingTokens(text))

    def forget_group(self, group_id: str) -> None:
        """Drop what drafting and the KV pool keep of a group."""
        if not (self._drafter is None and self._kv_pool is None):
            self._send(ForgetGroup(group_id))

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

    async def probe_machine(self) -> MachineProbe:
        """Time a fixed piece of work in the worker's process.

        Raises:
            EngineError: the instance is busy or down.
        """
        answer = await self._call(ProbeMachine())
        assert answer.probe is not None
        return answer.probe

    async def reset_cache(self) -> None:
        """Drop all cached KV and all drafts; an EngineError if the instance is busy or down."""
        await self._call(ResetCache())

    async def update_weights(self, source: WeightSpec, version: int) -> str | None:
        """Load what ``source`` names as weight version ``version``.

        Raises:
            EngineError: the instance is down, chunks are running, or the source does not hold the model's
                tensors, finite and of their shapes: then nothing has changed.  Or a layer does not answer by
                what was loaded: then the instance ends.
        """
        if source.directory is not None:  # the worker may have another working directory
            place = str(Path(source.directory).absolute())
            source = WeightSpec(source.path, {**source.settings, "directory": place})
        if source.adapter_config is not None and not self.spec.keeps_adapters:
            source = msgspec.structs.replace(source, base=self._whole)
        answer = await self._call(UpdateWeights(source, version))
        if source.adapter_config is None:
            self._whole = source
        return answer.fingerprint

    async def sleep(self) -> int:
        """Give memory back until ``wake``; return the bytes, 0 from an engine without ``sleep``.

        Raises:
            EngineError: the instance is busy or down, or refuses.
        """
        return (await self._call(Sleep())).freed_bytes

    async def wake(self) -> None:
        """Take the memory again; an EngineError if the instance is down."""
        await self._call(Wake())

    async def find_place(self, waiting: Callable[[str], None]) -> None:
        """Wait for a place where the worker can be started again."""
        raise NotImplementedError

    async def stop(self) -> None:
        """End the worker and all it started, bounded; the sink gets nothing any more."""
        self._down()
        await self._close()

    async def _open(self, start: Start) -> InstanceInfo:
        """Start the worker, which takes ``start`` with a scratch directory of its own.

        Raises:
            EngineError: it died while it started, or took too long.
        """
        raise NotImplementedError

    def _carry(self, message: ToWorker) -> None:
        """Send a message to the worker, which is up."""
        raise NotImplementedError

    async def _ask(self, message: ControlCall) -> Called:
        """Send a control message; return its answer, or why there is none as a refusal."""
        raise NotImplementedError

    async def _close(self) -> None:
        """End the worker, bounded."""
        raise NotImplementedError

    def _receive(self, message: FromWorker) -> None:
        """Pass a message of the worker on to the sink, in order; results of chunks that were dropped are not.

        Messages but ``Ready`` and ``Called`` come here.
        """
        sink = self._sink
        if sink is None:
            return
        match message:
            case Finished(output) if output.job_id in self._chunks:
                self._over(output.job_id)
                sink.chunk_finished(self.id, output)
            case Failed(job_id, reason) if job_id in self._chunks:
                self._over(job_id)
                sink.chunk_failed(self.id, job_id, reason)
            case Streamed(piece) if piece.job_id in self._chunks:
                sink.chunk_streamed(self.id, piece)
            case Telemetry():
                sink.reported(InstanceReported(self.id, **msgspec.structs.asdict(message)))
            case Degraded(what, reason):
                sink.degraded(InstanceDegraded(self.id, what, reason, self.log))
            case PoolMessage(note) if self._wired is not None:
                try:
                    self._wired.receive(self.id, note)
                except Exception as error:
                    self._wired = None  # until the next start
                    reason = f"the KV pool failed: {type(error).__name__}: {error}"
                    sink.degraded(InstanceDegraded(self.id, "kv_pool", reason, self.log))
            case _:
                pass

    def _lost(self, reason: str) -> None:
        """Report to the sink, once, that the worker is gone without having been asked to end."""
        sink = self._sink
        self._down()
        if sink is not None:
            sink.lost(self.id, reason)

    def _down(self) -> None:
        self._up = False
        self._sink = None
        self._chunks.clear()
        self._unsent.clear()
        self._images.clear()

    def _over(self, job_id: str) -> None:
        self._chunks.discard(job_id)
        self._images.close(job_id)

    def _send(self, message: ToWorker) -> None:
        if self._up:
            self._carry(message)

    def _send_note(self, note: Mapping[str, int]) -> None:
        self._send(PoolMessage(dict(note)))

    async def _call(self, message: ControlCall) -> Called:
        name = type(message).__name__
        rejection: str | None = None
        if not self._up:
            rejection = "it is not running"
        elif self._chunks:
            rejection = f"{len(self._chunks)} chunks are running"
        if rejection is None:
            answer = await self._ask(message)
            rejection = answer.rejection
        if rejection is not None:
            raise EngineError(f"{name} on instance {self.id!r}: {rejection}")
        return answer


def _digest_now(model_dir: str) -> str:
    """Return the digest of a model's files, which a trainer may have changed since the fleet was made."""
    if not model_dir:
        return ""
    try:
        return digest_of(Path(model_dir))
    except OSError as error:
        raise EngineError(f"the model in {model_dir} cannot be read: {describe_flaw(error)}") from error
