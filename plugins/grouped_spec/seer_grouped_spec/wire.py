"""What a draft server and its clients say to each other once they have met: msgpack, never pickle.

A frame is its length, four bytes, and one message.  Both directions are tagged unions, checked on arrival;
anything else is a ``WireError``.  Every request is answered once, in order, by a message with its ``seq``.
Tokens travel as int32, little-endian.  How two sides meet is told in ``handshake.py``.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Generic, TypeVar

import msgspec

__all__ = [
    "MAX_APPENDS",
    "MAX_APPEND_TOKENS",
    "MAX_GROUPS",
    "MAX_ID_BYTES",
    "MAX_MESSAGE_BYTES",
    "MAX_REQUESTS",
    "MAX_TTL_S",
    "TOKEN_BYTES",
    "Append",
    "Codec",
    "Done",
    "Failure",
    "Fetch",
    "Fetched",
    "Frames",
    "FromServer",
    "Refusal",
    "Register",
    "Stats",
    "StatsAsked",
    "ToServer",
    "Unregister",
    "Update",
    "Updated",
    "WireError",
    "read_appends",
    "read_info",
    "server_of",
]

HEADER_BYTES = 4
TOKEN_BYTES = 4
MAX_MESSAGE_BYTES = 2 << 20
MAX_ID_BYTES = 512
MAX_GROUPS = 4096
MAX_REQUESTS = 4096
MAX_APPENDS = 4096
"""In one message, over all groups."""
MAX_APPEND_TOKENS = 1 << 17
MAX_TTL_S = 30 * 86400.0

Message = TypeVar("Message")
Read = TypeVar("Read")


class WireError(Exception):
    """The other side sent something that is no message."""


Seq = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]
Id = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_ID_BYTES)]
Tokens = Annotated[bytes, msgspec.Meta(max_length=TOKEN_BYTES * MAX_APPEND_TOKENS)]
Ttl = Annotated[float, msgspec.Meta(gt=0, le=MAX_TTL_S)]


class Register(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Take part in groups, until unregistered or unused for ``ttl_s``; answered by ``Done``."""

    seq: Seq
    groups: Annotated[list[tuple[Id, Ttl]], msgspec.Meta(max_length=MAX_GROUPS)]


class Unregister(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Take part in groups no more; the last one out drops the group.  Answered by ``Done``."""

    seq: Seq
    groups: Annotated[list[Id], msgspec.Meta(max_length=MAX_GROUPS)]


class Append(msgspec.Struct, frozen=True, array_like=True):
    """``new_tokens`` of a request after its first ``prev_token_count``; without tokens, a question.

    The question is whether the server has as many tokens, and tells that this client has them.
    """

    request_id: Id
    prev_token_count: Count
    new_tokens: Tokens


class Update(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """The paper's ``update_cst``, for many requests at once, by group; answered by ``Updated``.

    Written with a list of ``Append`` per group; as read, each list is still to be read by ``read_appends``,
    so that a message of many small entries never takes many times its length.
    """

    seq: Seq
    groups: Annotated[list[tuple[Id, msgspec.Raw]], msgspec.Meta(max_length=MAX_GROUPS)]

    @classmethod
    def of(cls, seq: int, groups: Iterable[tuple[str, list[Append]]]) -> Update:
        """Return an update to be sent."""
        return cls(seq, list(groups))  # type: ignore[arg-type]  # a list is written as its Raw would be


class Fetch(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """The paper's ``fetch_cst``: what others wrote in the groups of this client; answered by ``Fetched``.

    ``draft_cache_infos`` are, by group and request, the numbers of tokens that the client has, where the
    server cannot know them from what it sent and received: after a reconnection, not otherwise.  As read,
    those of each group are still to be read by ``read_info``.
    """

    seq: Seq
    draft_cache_infos: Annotated[dict[Id, msgspec.Raw], msgspec.Meta(max_length=MAX_GROUPS)]

    @classmethod
    def of(cls, seq: int, infos: Mapping[str, Mapping[str, int]]) -> Fetch:
        """Return a fetch to be sent."""
        return cls(seq, infos)  # type: ignore[arg-type]  # as in ``Update.of``


class StatsAsked(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Tell figures; answered by ``Stats``."""

    seq: Seq


ToServer = Register | Unregister | Update | Fetch | StatsAsked


class Done(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """It is done; ``refused`` are groups that the server has no room for."""

    seq: Seq
    refused: list[Id]


class Refusal(msgspec.Struct, frozen=True, array_like=True):
    """An append that was refused, and the number of tokens the server ``have``s of the request.

    Kinds: ``unknown_group``, ``gap`` (send from ``have`` on), ``disagreement`` (the server keeps what it
    has), ``evicted`` (the group was too much for the server's memory), ``bad_tokens``, ``too_many``.
    """

    group_id: Id
    request_id: Id
    kind: str
    have: Count


class Updated(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """All appends were taken but these."""

    seq: Seq
    refused: list[Refusal]


class Fetched(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """What is new, by group; ``more``: ask again at once; ``dropped``: groups that are no longer there."""

    seq: Seq
    groups: list[tuple[Id, list[Append]]]
    dropped: list[Id]
    more: bool


class Stats(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Figures by name."""

    seq: Seq
    figures: dict[str, float]


class Failure(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The whole request was refused; seq 0 if it could not be read.

    Kinds: ``message``, ``internal``.
    """

    seq: Seq
    kind: str
    reason: str


FromServer = Done | Updated | Fetched | Stats | Failure

_encoder = msgspec.msgpack.Encoder()
_appends = msgspec.msgpack.Decoder(Annotated[list[Append], msgspec.Meta(max_length=MAX_APPENDS)])
_info = msgspec.msgpack.Decoder(Annotated[dict[Id, Count], msgspec.Meta(max_length=MAX_REQUESTS)])


class Codec(Generic[Message]):
    """Messages of the union ``kind``."""

    def __init__(self, kind: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(kind)

    def decode(self, body: bytes) -> Message:
        """Return the message that a frame holds.

        Raises:
            WireError: it is no message.
        """
        return _read(self._decoder, body)

    @staticmethod
    def encode(message: ToServer | FromServer) -> bytes:
        """Return ``message`` as a frame."""
        frame = bytearray(HEADER_BYTES)
        _encoder.encode_into(message, frame, HEADER_BYTES)
        size = len(frame) - HEADER_BYTES
        if size > MAX_MESSAGE_BYTES:
            raise WireError(f"a message of {size} bytes exceeds {MAX_MESSAGE_BYTES}")
        frame[:HEADER_BYTES] = size.to_bytes(HEADER_BYTES, "big")
        return bytes(frame)


class Frames:
    """Cuts what arrives into the bodies of frames; ``len`` is what it holds, less than a frame if read up."""

    def __init__(self) -> None:
        self._held = bytearray()

    def __len__(self) -> int:
        return len(self._held)

    def add(self, data: bytes) -> None:
        """Take what has arrived."""
        self._held += data

    def cut(self, size: int) -> bytes | None:
        """Take the next ``size`` bytes, None if they are not there yet."""
        if len(self._held) < size:
            return None
        data = bytes(memoryview(self._held)[:size])
        del self._held[:size]
        return data

    def next(self) -> bytes | None:
        """Take the next frame's body, None if it is not there yet.

        Raises:
            WireError: the frame is larger than any message.
        """
        if len(self._held) < HEADER_BYTES:
            return None
        size = int.from_bytes(self._held[:HEADER_BYTES], "big")
        if size > MAX_MESSAGE_BYTES:
            raise WireError(f"a message of {size} bytes exceeds {MAX_MESSAGE_BYTES}")
        frame = self.cut(HEADER_BYTES + size)
        return None if frame is None else frame[HEADER_BYTES:]


def read_appends(raw: msgspec.Raw) -> list[Append]:
    """Return the appends to one group of an ``Update``, or raise ``WireError``."""
    return _read(_appends, raw)


def read_info(raw: msgspec.Raw) -> dict[str, int]:
    """Return what a ``Fetch`` says of one group, or raise ``WireError``."""
    return _read(_info, raw)


def server_of(group_id: str, servers: int) -> int:
    """Return which of so many servers keeps a group: the same everywhere, always."""
    return zlib.crc32(group_id.encode()) % servers


def _read(decoder: msgspec.msgpack.Decoder[Read], data: bytes | msgspec.Raw) -> Read:
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"not a message: {error}") from error
