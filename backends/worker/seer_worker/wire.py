"""The messages between the runtime and an engine's worker, and both ends of the stream that carries them.

Both directions are tagged unions, in the frames of ``seer_host.frames``, checked on arrival; anything else is
a ``WireError`` and ends the connection.
"""

from __future__ import annotations

import asyncio
import select
import socket
from contextlib import suppress
from typing import Any

import msgspec
from seer_host.frames import Frames, WireError, encode
from seer_host.json_files import describe_flaw
from seer_host.machine_probe import MachineProbe

from seer_core.model import InstanceInfo
from seer_core.ports.drafting import SiblingTokens, SourceSpec, StepTimes
from seer_core.ports.engine import ChunkJob, ChunkOutput, ChunkPiece
from seer_core.ports.kv import LOOPBACK, StoreSpec
from seer_core.ports.weights import WeightSpec
from seer_worker.tokenizer.reading import TokenizerReading

__all__ = [
    "AbortChunk",
    "AddSiblingTokens",
    "Called",
    "Channel",
    "ControlCall",
    "Degraded",
    "DropImages",
    "EndChunkEarly",
    "Failed",
    "Fatal",
    "Finished",
    "ForgetGroup",
    "FromWorker",
    "HoldImage",
    "Link",
    "MeasureSteps",
    "Measured",
    "PoolMessage",
    "ProbeMachine",
    "ReadTokenizer",
    "Ready",
    "ResetCache",
    "RuntimeGoneError",
    "Shutdown",
    "Sleep",
    "Start",
    "Streamed",
    "Submit",
    "Telemetry",
    "ToWorker",
    "TokenizerRead",
    "UpdateWeights",
    "Wake",
]


class Measured(msgspec.Struct, frozen=True):
    """Measurements that an instance has made of itself when it started."""

    device: str
    """The kind of device that it computes on, empty where that is not known."""
    moves: dict[str, float]
    """What chunks cost to begin and to move, by the field of ``InstanceInfo``."""
    step_times: StepTimes | None = None
    """The times of steps that draft, where its draft source came without."""


class Start(msgspec.Struct, frozen=True, tag=True):
    """The first message: make the instance; files that need not outlive it belong into ``scratch``.

    ``instance`` is ``package.module:Class``, an ``EngineAdapter`` called with this message; ``settings`` is
    plain data of its own.  ``own_methods`` are the engine's methods of drafting, ``<engine>:<method>``,
    which a source may name instead of a class.  ``seer`` is the runtime's version; ``model_dir`` is to hold
    files of this digest, if it is given.  ``tokenizer_dir`` has the model's tokenizer, which stop strings
    need; it may run code of that directory if ``trust_remote_code``.  Responses end with one of
    ``end_token_ids``.  ``address`` is this node's, which the worker itself finds out.  ``measured`` is what
    another instance like this one has measured on this machine; the worker need not measure it again.
    """

    instance: str
    instance_id: str
    settings: dict[str, Any]
    scratch: str
    source: SourceSpec | None = None
    store: StoreSpec | None = None
    own_methods: tuple[str, ...] = ()
    seer: str = ""
    model_dir: str = ""
    model_digest: str = ""
    tokenizer_dir: str = ""
    trust_remote_code: bool = False
    end_token_ids: tuple[int, ...] = ()
    address: str = LOOPBACK
    measured: Measured | None = None


class ReadTokenizer(msgspec.Struct, frozen=True, tag=True):
    """In place of ``Start``: read the tokenizer of a directory, or unless ``textual`` its end tokens alone.

    Answered by ``TokenizerRead``, or ``Fatal``.
    """

    model_dir: str
    trust_remote_code: bool
    textual: bool


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Run a chunk."""

    job: ChunkJob


class AbortChunk(msgspec.Struct, frozen=True, tag=True):
    """Drop a chunk, silently."""

    job_id: str


class EndChunkEarly(msgspec.Struct, frozen=True, tag=True):
    """End a chunk with its next token; silently, for the chunk's own answer follows."""

    job_id: str


class AddSiblingTokens(msgspec.Struct, frozen=True, tag=True):
    """Give drafting what a response has written on another instance, silently."""

    text: SiblingTokens


class ForgetGroup(msgspec.Struct, frozen=True, tag=True):
    """Drop what drafting and the KV pool remember of a group, silently."""

    group_id: str


class HoldImage(msgspec.Struct, frozen=True, tag=True):
    """Hold the file of an image, which chunks name by its digest, silently."""

    digest: str
    data: bytes


class DropImages(msgspec.Struct, frozen=True, tag=True):
    """Drop images that no chunk needs, silently."""

    digests: tuple[str, ...]


class ResetCache(msgspec.Struct, frozen=True, tag=True):
    """Forget all cached KV and all that drafting remembers; answered by ``Called``."""


class UpdateWeights(msgspec.Struct, frozen=True, tag=True):
    """Load what ``source`` names as weight ``version``; answered by ``Called``."""

    source: WeightSpec
    version: int


class Sleep(msgspec.Struct, frozen=True, tag=True):
    """Give memory back; answered by ``Called``, with the bytes."""


class Wake(msgspec.Struct, frozen=True, tag=True):
    """Take the memory again; answered by ``Called``."""


class MeasureSteps(msgspec.Struct, frozen=True, tag=True):
    """Measure steps on this grid; answered by ``Called``, with the times."""

    batch: tuple[int, ...]
    draft_tokens: tuple[int, ...]
    context_tokens: int | None


class ProbeMachine(msgspec.Struct, frozen=True, tag=True):
    """Time a fixed piece of work; answered by ``Called``, with its times."""


class PoolMessage(msgspec.Struct, frozen=True, tag=True):
    """A note between the KV pool and an instance's store, both ways; silently."""

    note: dict[str, int]


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """End the process."""


ControlCall = ResetCache | UpdateWeights | Sleep | Wake | MeasureSteps | ProbeMachine
"""What is answered by ``Called``."""

ToWorker = (
    Start
    | ReadTokenizer
    | Submit
    | AbortChunk
    | EndChunkEarly
    | AddSiblingTokens
    | ForgetGroup
    | HoldImage
    | DropImages
    | PoolMessage
    | ControlCall
    | Shutdown
)


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The engine is up."""

    info: InstanceInfo
    measured: Measured | None = None


class TokenizerRead(msgspec.Struct, frozen=True, tag=True):
    """The answer to ``ReadTokenizer``."""

    reading: TokenizerReading


class Finished(msgspec.Struct, frozen=True, tag=True):
    """A chunk came to its end."""

    output: ChunkOutput


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A chunk was refused."""

    job_id: str
    reason: str


class Streamed(msgspec.Struct, frozen=True, tag=True):
    """A running chunk has written more."""

    piece: ChunkPiece


class Telemetry(msgspec.Struct, frozen=True, tag=True):
    """The load and the times of an instance, as in ``InstanceReported``; the worker adds ``stepping_s``."""

    running: int
    waiting: int
    kv_usage: float
    stepping_s: float = 0.0
    drafting_s: float = 0.0
    drafting: dict[str, float] = {}
    emulated_s: float = 0.0
    overrun_s: float = 0.0


class Called(msgspec.Struct, frozen=True, tag=True):
    """The answer to the oldest control message not yet answered; ``rejection`` is None if it worked.

    ``fingerprint`` stands for the weights just loaded, ``freed_bytes`` is what sleeping gave back.
    """

    rejection: str | None = None
    step_times: StepTimes | None = None
    fingerprint: str | None = None
    freed_bytes: int = 0
    probe: MachineProbe | None = None


class Degraded(msgspec.Struct, frozen=True, tag=True):
    """A part of the instance, ``drafting`` or ``kv_pool``, fails, and the instance works on without it; or
    ``continuation``: the model at hand answers otherwise where a response goes on.
    """

    what: str
    reason: str


class Fatal(msgspec.Struct, frozen=True, tag=True):
    """The worker cannot go on and is about to exit."""

    reason: str


FromWorker = (
    Ready | TokenizerRead | Finished | Failed | Streamed | Telemetry | Called | PoolMessage | Degraded | Fatal
)


class Channel:
    """The runtime's end: the part of a ``RunningWorker`` that is the same wherever it runs."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.received_bytes = 0
        self.fatal: str | None = None
        """The reason that the worker sent of its own end, if it did."""
        self._reader, self._writer = reader, writer
        self._loop = asyncio.get_running_loop()
        self._frames: Frames[FromWorker] = Frames(FromWorker)
        self._outbox: list[bytes] = []

    def send(self, message: ToWorker) -> None:
        """Send a message at the end of this turn of the event loop, all of one turn together."""
        if not self._outbox:
            self._loop.call_soon(self._flush)
        self._outbox.append(encode(message))

    async def receive(self) -> list[FromWorker]:
        """Wait for the next messages; ``Fatal`` is kept in ``fatal``, too.

        Raises:
            EOFError: the worker is gone; a text says how the connection broke, if it was not closed.
            WireError: it sent something that is no message.
        """
        while True:
            try:
                data = await self._reader.read(1 << 20)
            except ConnectionError as error:
                raise EOFError from error
            except OSError as error:  # as of a host that is gone; ETIMEDOUT is a TimeoutError
                raise EOFError(f"its connection broke: {describe_flaw(error)}") from error
            if not data:
                raise EOFError
            self.received_bytes += len(data)
            messages = list(self._frames.feed(data))
            for message in messages:
                if isinstance(message, Fatal):
                    self.fatal = message.reason
            if messages:
                return messages

    def close(self) -> None:
        """Close the stream."""
        self._writer.close()

    def _flush(self) -> None:
        self._writer.write(b"".join(self._outbox))
        self._outbox.clear()


class RuntimeGoneError(EOFError):
    """The connection of a worker to its runtime has ended.

    Remedy: none is needed; the worker ends, as an engine's own ``EOFError`` must not.
    """


class Link:
    """The worker's end, blocking."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._frames: Frames[ToWorker] = Frames(ToWorker)

    def send(self, *messages: FromWorker) -> None:
        """Send messages, in order; a chunk whose answer is too large for a frame has failed.

        Raises:
            RuntimeGoneError: the connection to it has ended.
        """
        if messages:
            data = b"".join(map(_encoded, messages))
            try:
                self._socket.sendall(data)
            except OSError as error:
                raise RuntimeGoneError(f"the connection to the runtime broke: {error}") from error

    def send_last(self, reason: str) -> None:
        """Send why the worker ends, if the runtime is still there."""
        with suppress(RuntimeGoneError):
            self.send(Fatal(reason))

    def receive(self, *, wait: bool) -> list[ToWorker]:
        """Return every message that has arrived; with ``wait``, at least some bytes' worth.

        Raises:
            RuntimeGoneError: the connection to it has ended.
        """
        messages: list[ToWorker] = []
        while wait or select.select([self._socket], [], [], 0)[0]:
            try:
                data = self._socket.recv(1 << 20)
            except OSError as error:  # also a TimeoutError, of TCP to a host that is gone
                raise RuntimeGoneError(f"the connection to the runtime broke: {error}") from error
            if not data:
                raise RuntimeGoneError("the runtime closed the connection")
            messages += self._frames.feed(data)
            wait = False
        return messages


def _encoded(message: FromWorker) -> bytes:
    try:
        return encode(message)
    except WireError as error:
        if not isinstance(message, Finished):
            raise
        return encode(Failed(message.output.job_id, f"its answer is too large: {error}"))
