"""Messages on a byte stream: length-prefixed msgpack, never pickle.

A frame is four bytes of length, big-endian, and one msgpack-encoded message.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import msgspec

from seer_core.model.arrays import packed, unpacked
from seer_host.json_files import UNREADABLE, describe_flaw

__all__ = ["MAX_FRAME_BYTES", "Frames", "WireError", "encode"]

HEADER_BYTES = 4
MAX_FRAME_BYTES = 64 << 20

Message = TypeVar("Message")


class WireError(Exception):
    """The other side sent something that is no message."""


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
                raise WireError(f"not a message: {describe_flaw(error)}") from error
            yield message
