"""What a draft server and its clients say to each other: one frame per message, msgpack, never pickle.

A frame is the magic bytes, the protocol's version, the length of the key, the key, and one message.  The
version comes before anything that may ever change, and the key before anything that must be parsed.
Both directions are tagged unions, checked on arrival; anything else is a ``WireError``.

Every request is answered once, by a message with its ``seq``.  Tokens travel as int32, little-endian.
"""

from __future__ import annotations

import hmac
import zlib
from typing import Annotated, Any, Generic, TypeVar

import msgspec

__all__ = [
    "MAX_APPENDS",
    "MAX_APPEND_TOKENS",
    "MAX_GROUPS",
    "MAX_ID_BYTES",
    "MAX_KEY_BYTES",
    "MAX_MESSAGE_BYTES",
    "MAX_REQUESTS",
    "MAX_TTL_S",
    "PROTOCOL_VERSION",
    "TOKEN_BYTES",
    "TOKEN_VARIABLE",
    "Append",
    "Codec",
    "Done",
    "Failure",
    "Fetch",
    "Fetched",
    "FromServer",
    "Listening",
    "Refusal",
    "Register",
    "Stats",
    "StatsAsked",
    "ToServer",
    "Unregister",
    "Update",
    "Updated",
    "WireError",
    "server_of",
]

PROTOCOL_VERSION = 1
MAGIC = b"SDG"
HEADER_BYTES = len(MAGIC) + 2 + 1

TOKEN_BYTES = 4
MAX_MESSAGE_BYTES = 4 << 20
MAX_KEY_BYTES = 255
MAX_ID_BYTES = 512
MAX_GROUPS = 4096
MAX_REQUESTS = 4096
MAX_APPENDS = 4096
MAX_APPEND_TOKENS = 1 << 18
MAX_TTL_S = 30 * 86400.0

TOKEN_VARIABLE = "SEER_DRAFT_TOKEN"
"""Environment variable that gives a server the key it is to ask for."""


class Listening(msgspec.Struct, frozen=True):
    """The line that a server prints, as JSON, when it can be reached."""

    endpoint: str
    pid: int
    protocol: int


Message = TypeVar("Message")


class WireError(Exception):
    """The other side sent something that is no message; ``kind`` is that of the ``Failure`` to answer."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


Seq = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]
Id = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_ID_BYTES)]
ClientId = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Tokens = Annotated[bytes, msgspec.Meta(max_length=TOKEN_BYTES * MAX_APPEND_TOKENS)]
Ttl = Annotated[float, msgspec.Meta(gt=0, le=MAX_TTL_S)]
CacheInfo = Annotated[dict[Id, Count], msgspec.Meta(max_length=MAX_REQUESTS)]


class Register(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Take part in groups, until unregistered or unused for ``ttl_s``; answered by ``Done``."""

    seq: Seq
    client: ClientId
    groups: Annotated[list[tuple[Id, Ttl]], msgspec.Meta(max_length=MAX_GROUPS)]


class Unregister(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Take part in groups no more; the last one out drops the group.  Answered by ``Done``."""

    seq: Seq
    client: ClientId
    groups: Annotated[list[Id], msgspec.Meta(max_length=MAX_GROUPS)]


class Append(msgspec.Struct, frozen=True, array_like=True):
    """``new_tokens`` of a request after its first ``prev_token_count``; without tokens, a question.

    The question is whether the server has as many tokens, and tells that this client has them.
    """

    request_id: Id
    prev_token_count: Count
    new_tokens: Tokens


class Update(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """The paper's ``update_cst``, for many requests at once, by group; answered by ``Updated``."""

    seq: Seq
    client: ClientId
    groups: Annotated[
        list[tuple[Id, Annotated[list[Append], msgspec.Meta(max_length=MAX_APPENDS)]]],
        msgspec.Meta(max_length=MAX_GROUPS),
    ]


class Fetch(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """The paper's ``fetch_cst``: what others wrote in the groups of this client; answered by ``Fetched``.

    ``draft_cache_infos`` are, by group and request, the numbers of tokens that the client has, where the
    server cannot know them from what it sent and received: after a reconnection, not otherwise.
    """

    seq: Seq
    client: ClientId
    draft_cache_infos: Annotated[dict[Id, CacheInfo], msgspec.Meta(max_length=MAX_GROUPS)]


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

    Kinds: ``message``, ``version``, ``key``, ``unknown_client`` (register again), ``internal``.
    """

    seq: Seq
    kind: str
    reason: str


FromServer = Done | Updated | Fetched | Stats | Failure

_encoder = msgspec.msgpack.Encoder()


class Codec(Generic[Message]):
    """Frames of the union ``kind``; with a ``key``, every frame read must carry it."""

    def __init__(self, kind: Any, key: bytes = b"") -> None:
        if len(key) > MAX_KEY_BYTES:
            raise ValueError(f"a key of {len(key)} bytes exceeds {MAX_KEY_BYTES}")
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(kind)
        self._key = key

    def decode(self, frame: bytes) -> Message:
        """Return the message in ``frame``.

        Raises:
            WireError: it is of another protocol or version, has another key, or is no message.
        """
        if frame[: len(MAGIC)] != MAGIC or len(frame) < HEADER_BYTES:
            raise WireError("message", "not a frame of this protocol")
        if len(frame) > MAX_MESSAGE_BYTES:
            raise WireError("message", f"a frame of {len(frame)} bytes exceeds {MAX_MESSAGE_BYTES}")
        version = int.from_bytes(frame[len(MAGIC) : len(MAGIC) + 2], "big")
        if version != PROTOCOL_VERSION:
            raise WireError("version", f"protocol version {version}; this side speaks {PROTOCOL_VERSION}")
        body = HEADER_BYTES + frame[HEADER_BYTES - 1]
        if not hmac.compare_digest(frame[HEADER_BYTES:body], self._key):
            raise WireError("key", "the key is wrong or missing")
        try:
            return self._decoder.decode(memoryview(frame)[body:])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise WireError("message", f"not a message: {error}") from error

    @staticmethod
    def encode(message: ToServer | FromServer, key: bytes = b"") -> bytes:
        """Return ``message`` as a frame with ``key``."""
        frame = bytearray(MAGIC)
        frame += PROTOCOL_VERSION.to_bytes(2, "big")
        frame.append(len(key))
        frame += key
        _encoder.encode_into(message, frame, len(frame))
        if len(frame) > MAX_MESSAGE_BYTES:
            raise WireError("message", f"a frame of {len(frame)} bytes exceeds {MAX_MESSAGE_BYTES}")
        return bytes(frame)


def server_of(group_id: str, servers: int) -> int:
    """Return which of so many servers keeps a group: the same everywhere, always."""
    return zlib.crc32(group_id.encode()) % servers
