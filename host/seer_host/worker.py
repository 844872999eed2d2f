"""What runs in the process of one instance, wherever a launcher has started it.

A plain loop around an ``Instance``: take every message that has arrived, make one step, send what has ended.
"""

from __future__ import annotations

import select
import socket
import traceback
from collections.abc import Callable, Sequence
from math import inf, isfinite
from time import perf_counter
from typing import Any

import structlog
from msgspec import structs

from seer_core.arrays import Logprobs, Tokens
from seer_core.errors import EngineError
from seer_core.ports import ChunkJob, ChunkPiece
from seer_host.drafts import check_source
from seer_host.instance import (
    INSTANCE,
    DraftingInstance,
    Instance,
    PoolingInstance,
    Refusal,
    Scripted,
    Sleeper,
    StreamingInstance,
)
from seer_host.wire import (
    Abort,
    Called,
    ControlCall,
    Failed,
    Fatal,
    ForgetGroup,
    Frames,
    FromWorker,
    Grown,
    MeasureSteps,
    PoolNote,
    Ready,
    ResetCache,
    Shutdown,
    Sleep,
    Start,
    Submit,
    Teach,
    ToWorker,
    Troubled,
    UpdateWeights,
    Wake,
    WireError,
    encode,
)

__all__ = ["Link", "Worker", "work"]

log = structlog.get_logger("seer")

TRACEBACK_LINES = 12
ASLEEP = "it is asleep; wake it first"
REPORT_INTERVAL_S = 0.2
"""Telemetry is sent at most this often, and once when falling idle."""
PIECE_INTERVAL_S = 0.05
"""Pieces of chunks that stream are sent at most this often, but for the first of each."""


class Link:
    """The worker's end of the socket, blocking."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._frames: Frames[ToWorker] = Frames(ToWorker)

    def send(self, *messages: FromWorker) -> None:
        """Send messages, in order."""
        if messages:
            self._socket.sendall(b"".join(map(encode, messages)))

    def receive(self, *, wait: bool) -> list[ToWorker]:
        """Return every message that has arrived; with ``wait``, at least some bytes' worth.

        Raises:
            EOFError: the runtime is gone.
        """
        messages: list[ToWorker] = []
        while wait or select.select([self._socket], [], [], 0)[0]:
            data = self._socket.recv(1 << 20)
            if not data:
                raise EOFError("the runtime closed the connection")
            messages += self._frames.feed(data)
            wait = False
        return messages


class Worker:
    """Drives an instance: chunks in, answers out, and control calls only while it is idle.

    What it has to say goes to ``send``, messages in order; ``clock`` returns the seconds that steps take.
    """

    def __init__(
        self,
        send: Callable[..., None],
        instance: Instance,
        clock: Callable[[], float] = perf_counter,
        report_interval_s: float = REPORT_INTERVAL_S,
    ) -> None:
        self._send = send
        self._instance = instance
        self._clock = clock
        self._report_interval_s = report_interval_s
        self._next_report_s = -inf
        self._next_pieces_s = -inf
        self._running: set[str] = set()
        self._told: dict[str, int] = {}
        self._weight_version = 0
        self._asleep = False
        self._stepping_s = 0.0

    @property
    def busy(self) -> bool:
        """Whether chunks are running."""
        return bool(self._running)

    def serve(self, link: Link) -> None:
        """Work until the runtime says ``Shutdown``."""
        while True:
            for message in link.receive(wait=not self._running):
                if isinstance(message, Shutdown):
                    return
                self.obey(message)
            if self._running:
                self.step()

    def obey(self, message: ToWorker) -> None:
        """Do what a message says; a control call is answered at once."""
        match message:
            case Submit(job):
                self._submit(job)
            case Abort(job_id):
                if job_id in self._running:
                    self._running.remove(job_id)
                    self._told.pop(job_id, None)
                    self._instance.abort(job_id)
            case Teach(text):
                if isinstance(self._instance, DraftingInstance):
                    self._instance.teach(text)
            case ForgetGroup(group_id):
                if isinstance(self._instance, DraftingInstance | PoolingInstance):
                    self._instance.forget_group(group_id)
            case PoolNote(note):
                if isinstance(self._instance, PoolingInstance):
                    self._instance.pool_told(note)
            case ResetCache() | UpdateWeights() | Sleep() | Wake() | MeasureSteps():
                self._send(self._call(message))
            case Start() | Shutdown():
                raise ValueError("started twice")

    def _submit(self, job: ChunkJob) -> None:
        tokens, limit = len(job.token_ids) + job.max_tokens, self._instance.info.max_model_tokens
        try:
            if self._asleep:
                raise Refusal(ASLEEP)
            if job.weight_version != self._weight_version:
                wanted, loaded = job.weight_version, self._weight_version
                raise Refusal(f"the chunk wants weight version {wanted}, loaded is {loaded}")
            if tokens > limit:
                raise Refusal(f"the chunk needs {tokens} tokens, max_model_tokens is {limit}")
            self._instance.submit(job)
        except Refusal as refusal:
            self._send(Failed(job.id, str(refusal)))
        else:
            self._running.add(job.id)
            if job.streams and isinstance(self._instance, StreamingInstance):
                self._told[job.id] = 0

    def _call(self, message: ControlCall) -> Called:
        if self._running:
            return Called(f"{len(self._running)} chunks are running")
        if self._asleep and not isinstance(message, Sleep | Wake):
            return Called(ASLEEP)
        try:
            match message:
                case ResetCache():
                    self._instance.reset_cache()
                    return Called()
                case MeasureSteps(batch, draft_tokens, context_tokens):
                    times = self._instance.measure_steps(batch, draft_tokens, context_tokens)
                    return Called(step_times=times)
                case UpdateWeights(source, version):
                    fingerprint = self._instance.update_weights(source, version)
                    self._weight_version = version
                    return Called(fingerprint=fingerprint)
                case Sleep():
                    return Called(freed_bytes=self._sleep())
                case Wake():
                    self._wake()
                    return Called()
        except Refusal as refusal:
            return Called(str(refusal))

    def _sleep(self) -> int:
        if self._asleep:
            return 0
        freed_bytes = 0
        if isinstance(self._instance, Sleeper):
            freed_bytes = self._instance.sleep()
        else:
            self._instance.reset_cache()
        self._asleep = True
        return freed_bytes

    def _wake(self) -> None:
        if self._asleep and isinstance(self._instance, Sleeper):
            self._instance.wake()
        self._asleep = False

    def step(self) -> None:
        """Make a step, and tell what came of it."""
        begun_s = self._clock()
        results = self._instance.step()
        now_s = self._clock()
        self._stepping_s += now_s - begun_s
        for result in results:
            job_id = result.job_id if isinstance(result, Failed) else result.output.job_id
            self._running.discard(job_id)
            self._told.pop(job_id, None)
        report = not self._running or now_s >= self._next_report_s
        telemetry = (
            [structs.replace(self._instance.telemetry(), stepping_s=self._stepping_s)] if report else []
        )
        # Troubles and counts first: the rollout may be over, and summed up, with the last result.
        told = _told_by(self._instance) if results or report else []
        self._send(*told, *self._grown(now_s), *results, *telemetry)
        if report:
            self._next_report_s = now_s + self._report_interval_s

    def _grown(self, now_s: float) -> list[Grown]:
        """Return what chunks that stream have written: at first at once, then every now and then."""
        due = now_s >= self._next_pieces_s
        grown = []
        for job_id, told in self._told.items():
            if due or not told:
                assert isinstance(self._instance, StreamingInstance)
                piece = _piece(job_id, told, *self._instance.written(job_id, told))
                if piece.token_ids:
                    grown.append(Grown(piece))
                    self._told[job_id] += len(piece.token_ids)
        if due and grown:
            self._next_pieces_s = now_s + PIECE_INTERVAL_S
        return grown


def _piece(job_id: str, start: int, tokens: Sequence[int], logprobs: Sequence[float]) -> ChunkPiece:
    """Return what of it may be told: a chunk fails for a log-prob that is not finite."""
    size = next((at for at, each in enumerate(logprobs) if not isfinite(each)), len(logprobs))
    size = min(size, len(tokens))
    return ChunkPiece(job_id, start, Tokens(tokens[:size]), Logprobs(logprobs[:size]))


def _told_by(instance: Instance) -> list[Troubled | PoolNote]:
    """Return what draft source and KV store complain of, and what the store tells the pool."""
    note = instance.pool_note() if isinstance(instance, PoolingInstance) else {}
    troubles = instance.troubles() if isinstance(instance, DraftingInstance | PoolingInstance) else []
    return [*troubles, *([PoolNote(note)] if note else [])]


def _check_helped(start: Start, instance: Instance) -> None:
    """Make sure that whoever was given a draft source or a KV store can be told what they need."""
    for given, what, kind in (
        (start.source, "a draft source", DraftingInstance),
        (start.store, "a KV store", PoolingInstance),
    ):
        if given is not None and not isinstance(instance, kind):
            raise EngineError(
                f"{type(instance).__name__} took {what}, and has not all methods of"
                f" seer_host.instance.{kind.__name__}"
            )


def work(connection: socket.socket, before_close: Callable[[], object] = lambda: None) -> int:
    """Serve the runtime at the other end; return the exit status.

    ``before_close`` is called once there is nothing left to do but to close the instance.
    """
    link = Link(connection)
    instance: Instance | None = None
    try:
        start, *early = link.receive(wait=True)
        if not isinstance(start, Start) or early:
            raise ValueError("the first message must be Start, alone")
        if start.source is not None:
            check_source(start.source, start.own_methods)  # the engine's import takes seconds
        make: Any = INSTANCE.load(start.instance)
        instance = make(start)
        _check_helped(start, instance)
        if not isinstance(instance, Scripted):
            from seer_host.selftest import check_keyed  # imports torch, which takes seconds

            check_keyed(instance)
        link.send(*_told_by(instance), Ready(instance.info))
        Worker(link.send, instance).serve(link)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return 0
    except (EngineError, WireError) as error:
        link.send(Fatal(str(error)))
        return 1
    except Exception:
        tail = traceback.format_exc().splitlines()[-TRACEBACK_LINES:]
        log.exception("worker_failed")
        link.send(Fatal("\n".join(tail)))
        return 1
    finally:
        before_close()
        if instance is not None:
            instance.close()
    return 0
