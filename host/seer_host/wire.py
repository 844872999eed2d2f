"""What the runtime and an engine's worker say to each other: length-prefixed msgpack, never pickle.

A frame is four bytes of length, big-endian, and one msgpack-encoded message.  Both directions are
tagged unions, checked on arrival; anything else is a ``WireError`` and ends the connection.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import msgspec

from seer_core.arrays import packed, unpacked
from seer_core.drafting import SiblingText, SourceSpec, StepTimes
from seer_core.kv import StoreSpec
from seer_core.model import InstanceInfo
from seer_core.ports import ChunkJob, ChunkOutput, ChunkPiece
from seer_core.reading import UNREADABLE, flaw
from seer_core.weights import WeightSpec

__all__ = [
    "MAX_FRAME_BYTES",
    "Abort",
    "Called",
    "ControlCall",
    "Failed",
    "Fatal",
    "Finished",
    "ForgetGroup",
    "Frames",
    "FromWorker",
    "Grown",
    "MeasureSteps",
    "PoolNote",
    "Ready",
    "ResetCache",
    "Shutdown",
    "Sleep",
    "Start",
    "Submit",
    "Teach",
    "Telemetry",
    "ToWorker",
    "Troubled",
    "UpdateWeights",
    "Wake",
    "WireError",
    "encode",
]

HEADER_BYTES = 4
MAX_FRAME_BYTES = 64 << 20

Message = TypeVar("Message")


class WireError(Exception):
    """The other side sent something that is no message."""


class Start(msgspec.Struct, frozen=True, tag=True):
    """The first message: make the instance; files that need not outlive it belong into ``scratch``.

    ``instance`` is ``package.module:Class``, an ``Instance`` called with this message; ``settings`` is plain
    data of its own.  ``own_methods`` are the engine's methods of drafting, ``<engine>:<method>``, which a
    source may name instead of a class.
    """

    instance: str
    instance_id: str
    settings: dict[str, Any]
    scratch: str
    source: SourceSpec | None = None
    store: StoreSpec | None = None
    own_methods: tuple[str, ...] = ()


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Run a chunk."""

    job: ChunkJob


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Drop a chunk, silently."""

    job_id: str


class Teach(msgspec.Struct, frozen=True, tag=True):
    """Let drafting know what a response has written on another instance, silently."""

    text: SiblingText


class ForgetGroup(msgspec.Struct, frozen=True, tag=True):
    """Drop what drafting and the KV pool remember of a group, silently."""

    group_id: str


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


class PoolNote(msgspec.Struct, frozen=True, tag=True):
    """What the KV pool and an instance's store tell each other, both ways; silently."""

    note: dict[str, int]


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """End the process."""


ControlCall = ResetCache | UpdateWeights | Sleep | Wake | MeasureSteps
"""What is answered by ``Called``."""

ToWorker = Start | Submit | Abort | Teach | ForgetGroup | PoolNote | ControlCall | Shutdown


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The engine is up."""

    info: InstanceInfo


class Finished(msgspec.Struct, frozen=True, tag=True):
    """A chunk came to its end."""

    output: ChunkOutput


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A chunk was refused."""

    job_id: str
    reason: str


class Grown(msgspec.Struct, frozen=True, tag=True):
    """A running chunk has written more."""

    piece: ChunkPiece


class Telemetry(msgspec.Struct, frozen=True, tag=True):
    """What an instance is doing, as ``InstanceReported`` has it; ``stepping_s`` comes from the worker."""

    running: int
    waiting: int
    kv_usage: float
    stepping_s: float = 0.0
    drafting_s: float = 0.0
    drafting: dict[str, float] = {}
    paced_s: float = 0.0
    overrun_s: float = 0.0


class Called(msgspec.Struct, frozen=True, tag=True):
    """The answer to the oldest control message not yet answered; ``refusal`` is None if it worked.

    ``fingerprint`` stands for the weights just loaded, ``freed_bytes`` is what sleeping gave back.
    """

    refusal: str | None = None
    step_times: StepTimes | None = None
    fingerprint: str | None = None
    freed_bytes: int = 0


class Troubled(msgspec.Struct, frozen=True, tag=True):
    """A part of the instance, ``drafting`` or ``kv_pool``, fails; the instance works on without it."""

    what: str
    reason: str


class Fatal(msgspec.Struct, frozen=True, tag=True):
    """The worker cannot go on and is about to exit."""

    reason: str


FromWorker = Ready | Finished | Failed | Grown | Telemetry | Called | PoolNote | Troubled | Fatal

_encoder = msgspec.msgpack.Encoder(enc_hook=packed)


def encode(message: msgspec.Struct) -> bytes:
    """Return ``message`` as one frame.

    Raises:
        WireError: it is too long, or nested too deeply.
    """
    try:
        body = _encoder.encode(message)
    except RecursionError as error:
        raise WireError(f"a {type(message).__name__} is nested too deeply") from error
    if len(body) > MAX_FRAME_BYTES:
        raise WireError(f"a {type(message).__name__} of {len(body)} bytes exceeds {MAX_FRAME_BYTES}")
    return len(body).to_bytes(HEADER_BYTES, "big") + body


class Frames(Generic[Message]):
    """Turns a byte stream back into messages of the union ``kind``."""

    def __init__(self, kind: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(kind, dec_hook=unpacked)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """Add bytes and yield every message that is now complete.

        Raises:
            WireError: a frame is too long, or is no message of this kind.
        """
        self._buffer += data
        while len(self._buffer) >= HEADER_BYTES:
            length = int.from_bytes(self._buffer[:HEADER_BYTES], "big")
            if length > MAX_FRAME_BYTES:
                raise WireError(f"a frame of {length} bytes exceeds {MAX_FRAME_BYTES}")
            end = HEADER_BYTES + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[HEADER_BYTES:end])
            del self._buffer[:end]
            try:
                message = self._decoder.decode(body)
            except UNREADABLE as error:
                raise WireError(f"not a message: {flaw(error)}") from error
            yield message
