"""A block as a value in the store: behind a header that says what it should be.

Mooncake checks nothing: a value may have been cut off, replaced, or written by somebody else, and memory of
a lease that ran out may be overwritten while it is copied.  So a value names its key, its length and the
format, and carries a checksum of all that and of the block.
"""

from __future__ import annotations

import numpy as np
import xxhash
from numpy.typing import NDArray

from seer_core.kv import KEY_BYTES

__all__ = ["HEADER_BYTES", "pack", "unpack"]

Bytes = NDArray[np.uint8]

FORMAT = b"seerkv01"
HEADER_BYTES = 64
"""A checksum, the format, the block's length and eight bytes of zero, then the key."""


def pack(key: bytes, block: Bytes, row: Bytes) -> None:
    """Write a value for ``block`` into ``row``, which is longer by the header."""
    row[8:HEADER_BYTES] = np.frombuffer(_about(key, block.size), np.uint8)
    row[HEADER_BYTES:] = block
    row[:8] = np.frombuffer(_digest(row[8:HEADER_BYTES], row[HEADER_BYTES:]), np.uint8)


def unpack(key: bytes, row: Bytes, block: Bytes) -> bool:
    """Copy the block out of ``row``; return whether the copy is whole, and what was packed under this key."""
    about = _about(key, block.size)
    if row[8:HEADER_BYTES].tobytes() != about:
        return False
    block[:] = row[HEADER_BYTES:]
    return row[:8].tobytes() == _digest(
        np.frombuffer(about, np.uint8), block
    )  # of the copy: a row may change


def _about(key: bytes, block_bytes: int) -> bytes:
    assert len(key) == KEY_BYTES
    return FORMAT + block_bytes.to_bytes(8, "little") + bytes(8) + key


def _digest(about: Bytes, block: Bytes) -> bytes:
    digest = xxhash.xxh3_64(about.data)
    digest.update(block.data)
    return digest.digest()
