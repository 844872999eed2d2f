"""The process of one instance, wherever a launcher has started it.

A plain loop around an ``EngineAdapter``: take every message that has arrived, make one step, send what has
ended.
"""

from __future__ import annotations

import select
import socket
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import inf, isfinite
from pathlib import Path
from time import perf_counter
from typing import Any

import structlog
from msgspec import structs
from seer_host.frames import Frames, WireError, encode

from seer_core.errors import ConfigError, EngineError
from seer_core.model import InstanceInfo
from seer_core.model.arrays import Logprobs, Tokens
from seer_core.ports.contracts import implemented
from seer_core.ports.engine import ChunkJob, ChunkPiece
from seer_core.ports.kv import StoreSpec
from seer_worker.process.drafts import check_source
from seer_worker.process.instance import DRAFTS, INSTANCE, SHARES_KV, EngineAdapter, Rejected
from seer_worker.process.place import node_name, own_address
from seer_worker.process.place_checks import check_place
from seer_worker.process.probe import probe_machine
from seer_worker.tokenizer.library import read
from seer_worker.wire import (
    AbortChunk,
    Called,
    ControlCall,
    Degraded,
    EndChunkEarly,
    Failed,
    Fatal,
    ForgetGroup,
    FromWorker,
    MeasureSteps,
    PoolMessage,
    ProbeMachine,
    PushSiblingTokens,
    ReadTokenizer,
    Ready,
    ResetCache,
    Shutdown,
    Sleep,
    Start,
    Streamed,
    Submit,
    TokenizerRead,
    ToWorker,
    UpdateWeights,
    Wake,
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
        """Send messages, in order.

        Raises:
            EOFError: the runtime is gone.
        """
        if messages:
            data = b"".join(map(encode, messages))
            try:
                self._socket.sendall(data)
            except OSError as error:
                raise EOFError(f"the connection to the runtime broke: {error}") from error

    def send_last(self, reason: str) -> None:
        """Send why the worker ends, if the runtime is still there."""
        with suppress(EOFError):
            self.send(Fatal(reason))

    def receive(self, *, wait: bool) -> list[ToWorker]:
        """Return every message that has arrived; with ``wait``, at least some bytes' worth.

        Raises:
            EOFError: the runtime is gone.
        """
        messages: list[ToWorker] = []
        while wait or select.select([self._socket], [], [], 0)[0]:
            try:
                data = self._socket.recv(1 << 20)
            except OSError as error:  # also a TimeoutError, of TCP to a host that is gone
                raise EOFError(f"the connection to the runtime broke: {error}") from error
            if not data:
                raise EOFError("the runtime closed the connection")
            messages += self._frames.feed(data)
            wait = False
        return messages


class Worker:
    """Drives an instance: chunks in, answers out, and control calls only while it is idle.

    Its messages go to ``send``, in order; ``clock`` returns the seconds that steps take.
    """

    def __init__(
        self,
        send: Callable[..., None],
        instance: EngineAdapter,
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
        self._streamed_tokens: dict[str, int] = {}
        self._with_tops: set[str] = set()
        self._weight_version = 0
        self._asleep = False
        self._stepping_s = 0.0

    @property
    def busy(self) -> bool:
        """Whether chunks are running."""
        return bool(self._running)

    def serve(self, link: Link) -> None:
        """Work until the runtime sends ``Shutdown``."""
        while True:
            for message in link.receive(wait=not self._running):
                if isinstance(message, Shutdown):
                    return
                self.handle(message)
            if self._running:
                self.step()

    def handle(self, message: ToWorker) -> None:
        """Pass a message on to the instance; a control call is answered at once."""
        match message:
            case Submit(job):
                self._submit(job)
            case AbortChunk(job_id):
                if job_id in self._running:
                    self._forget(job_id)
                    self._instance.abort(job_id)
            case EndChunkEarly(job_id):
                if job_id in self._running and (end_chunk := implemented(self._instance, "end_chunk")):
                    end_chunk(job_id)
            case PushSiblingTokens(text):
                if push_sibling_tokens := implemented(self._instance, "push_sibling_tokens"):
                    push_sibling_tokens(text)
            case ForgetGroup(group_id):
                if forget_group := implemented(self._instance, "forget_group"):
                    forget_group(group_id)
            case PoolMessage(note):
                if receive_pool_message := implemented(self._instance, "receive_pool_message"):
                    receive_pool_message(note)
            case ResetCache() | UpdateWeights() | Sleep() | Wake() | MeasureSteps() | ProbeMachine():
                self._send(self._call(message))
            case Start() | ReadTokenizer():
                raise WireError(f"a second {type(message).__name__} has arrived; a worker takes one")
            case Shutdown():
                raise WireError("Shutdown has arrived where a step was due; it ends ``Worker.serve``")

    def _submit(self, job: ChunkJob) -> None:
        tokens, limit = len(job.token_ids) + job.max_tokens, self._instance.info.max_model_tokens
        try:
            if self._asleep:
                raise Rejected(ASLEEP)
            if job.weight_version != self._weight_version:
                wanted, loaded = job.weight_version, self._weight_version
                raise Rejected(f"the chunk wants weight version {wanted}, loaded is {loaded}")
            if tokens > limit:
                raise Rejected(f"the chunk needs {tokens} tokens, max_model_tokens is {limit}")
            self._instance.submit(job)
        except Rejected as rejection:
            self._send(Failed(job.id, str(rejection)))
        else:
            self._running.add(job.id)
            needed = ("written", "top_logprobs") if job.sampling.top_logprobs else ("written",)
            if job.streams and all(implemented(self._instance, name) for name in needed):
                self._streamed_tokens[job.id] = 0
                if job.sampling.top_logprobs:
                    self._with_tops.add(job.id)

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
                case ProbeMachine():
                    return Called(probe=probe_machine())
                case UpdateWeights(source, version):
                    fingerprint = self._instance.update_weights(source, version)
                    self._weight_version = version
                    return Called(fingerprint=fingerprint)
                case Sleep():
                    return Called(freed_bytes=self._sleep())
                case Wake():
                    self._wake()
                    return Called()
        except Rejected as rejection:
            return Called(str(rejection))

    def _sleep(self) -> int:
        if self._asleep:
            return 0
        freed_bytes: int = 0
        if sleep := implemented(self._instance, "sleep"):
            freed_bytes = sleep()
        else:
            self._instance.reset_cache()
        self._asleep = True
        return freed_bytes

    def _wake(self) -> None:
        if self._asleep and (wake := implemented(self._instance, "wake")):
            wake()
        self._asleep = False

    def step(self) -> None:
        """Make a step, and send its results."""
        begun_s = self._clock()
        results = self._instance.step()
        now_s = self._clock()
        self._stepping_s += now_s - begun_s
        for result in results:
            job_id = result.job_id if isinstance(result, Failed) else result.output.job_id
            self._forget(job_id)
        report = not self._running or now_s >= self._next_report_s
        telemetry = (
            [structs.replace(self._instance.telemetry(), stepping_s=self._stepping_s)] if report else []
        )
        # Troubles and counts first: the rollout may be over, and summed up, with the last result.
        messages = _messages_from(self._instance) if results or report else []
        self._send(*messages, *self._grown(now_s), *results, *telemetry)
        if report:
            self._next_report_s = now_s + self._report_interval_s

    def _forget(self, job_id: str) -> None:
        self._running.discard(job_id)
        self._streamed_tokens.pop(job_id, None)
        self._with_tops.discard(job_id)

    def _grown(self, now_s: float) -> list[Streamed]:
        """Return what chunks that stream have written: at first at once, then every few steps."""
        due = now_s >= self._next_pieces_s
        grown = []
        for job_id, sent in self._streamed_tokens.items():
            if due or not sent:
                piece = _piece(job_id, sent, *self._instance.written(job_id, sent))
                if piece.token_ids:
                    if job_id in self._with_tops:
                        end = sent + len(piece.token_ids)
                        tops = self._instance.top_logprobs(job_id, sent, end)
                        piece = structs.replace(piece, top_logprobs=tops)
                    grown.append(Streamed(piece))
                    self._streamed_tokens[job_id] += len(piece.token_ids)
        if due and grown:
            self._next_pieces_s = now_s + PIECE_INTERVAL_S
        return grown


def _piece(job_id: str, start: int, tokens: Sequence[int], logprobs: Sequence[float]) -> ChunkPiece:
    """Return what may be sent of it: a chunk fails for a log-prob that is not finite."""
    size = next((at for at, each in enumerate(logprobs) if not isfinite(each)), len(logprobs))
    size = min(size, len(tokens))
    return ChunkPiece(job_id, start, Tokens(tokens[:size]), Logprobs(logprobs[:size]))


def _messages_from(instance: EngineAdapter) -> list[Degraded | PoolMessage]:
    """Return what has failed of draft source and KV store, and the store's message to the pool."""
    degradations = implemented(instance, "degradations") or list
    take_pool_message = implemented(instance, "take_pool_message") or dict
    note: dict[str, int] = take_pool_message()
    return [*degradations(), *([PoolMessage(note)] if note else [])]


def _check_adapter(start: Start, instance: EngineAdapter) -> None:
    """Refuse an instance that was given a draft source or a KV store and lacks methods for it."""
    for given, what, methods in (
        (start.source, "a draft source", DRAFTS),
        (start.store, "a KV store", SHARES_KV),
    ):
        lacking = [method for method in methods if implemented(instance, method) is None]
        if given is not None and lacking:
            raise EngineError(
                f"{type(instance).__name__} took {what}, and lacks {', '.join(lacking)} of"
                " seer_worker.process.instance.EngineAdapter"
            )


def _placed(info: InstanceInfo, store: StoreSpec | None) -> InstanceInfo:
    """Return the info with the node that this process runs on, and how far its KV reaches."""
    node = node_name()
    confined = store is not None and not store.spans_nodes
    return structs.replace(info, node=node, kv_reach=node if confined else "")


def work(connection: socket.socket, before_close: Callable[[], object] = lambda: None) -> int:
    """Serve the runtime at the other end; return the exit status.

    ``before_close`` is called once there is nothing left to do but to close the instance.
    """
    link = Link(connection)
    instance: EngineAdapter | None = None
    try:
        start, *early = link.receive(wait=True)
        if isinstance(start, ReadTokenizer) and not early:
            reading = read(Path(start.model_dir), start.trust_remote_code, start.textual)
            link.send(TokenizerRead(reading))
            return 0
        if not isinstance(start, Start) or early:
            raise WireError("the first message must be Start, alone")
        check_place(start)
        if start.source is not None:
            check_source(start.source, start.own_methods)  # the engine's import takes seconds
        make: Any = INSTANCE.load(start.instance)
        instance = make(structs.replace(start, address=own_address(connection)))
        _check_adapter(start, instance)
        if not getattr(instance, "emulated", False):
            from seer_worker.sampling import selftest  # imports torch, which takes seconds

            selftest.check_keyed(instance)
            if (reason := selftest.continued_otherwise(instance)) is not None:
                link.send(Degraded("continuation", reason))
        measured = getattr(instance, "measured", None)
        link.send(*_messages_from(instance), Ready(_placed(instance.info, start.store), measured))
        Worker(link.send, instance).serve(link)
    except EOFError:
        return 0
    except (ConfigError, EngineError, WireError) as error:
        link.send_last(str(error))
        return 1
    except Exception:
        tail = traceback.format_exc().splitlines()[-TRACEBACK_LINES:]
        log.exception("worker_failed")
        link.send_last("\n".join(tail))
        return 1
    finally:
        before_close()
        if instance is not None:
            instance.close()
    return 0
