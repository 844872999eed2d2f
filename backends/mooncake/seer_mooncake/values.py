"""A block as a value in the store: behind a header that describes it and is signed by its writer.

Mooncake checks nothing, and authenticates no client: a value may have been cut off, replaced, or written by
any process that reaches an instance's port, and memory of a lease that ran out may be overwritten while it is
copied.  So a value names its key, its length and the format, and carries a digest of all that and of the
block, keyed (BLAKE3) by a secret that only this run's instances have.
"""

from __future__ import annotations

import hmac

import numpy as np
from blake3 import blake3

from seer_core.ports.kv import KEY_BYTES, Bytes

__all__ = ["HEADER_BYTES", "SECRET_BYTES", "pack", "unpack"]

FORMAT = b"seerkv02"
DIGEST_BYTES = 16
SECRET_BYTES = 32
HEADER_BYTES = 64
"""A digest, the format, the block's length, then the key."""


def pack(secret: bytes, key: bytes, block: Bytes, row: Bytes) -> None:
    """Write a value for ``block`` into ``row``, which is longer by the header."""
    row[DIGEST_BYTES:HEADER_BYTES] = np.frombuffer(_about(key, block.size), np.uint8)
    row[HEADER_BYTES:] = block
    row[:DIGEST_BYTES] = np.frombuffer(_digest(secret, row[DIGEST_BYTES:]), np.uint8)


def unpack(secret: bytes, key: bytes, row: Bytes, block: Bytes) -> bool:
    """Copy the block out of ``row``; return whether the copy is whole, and what was packed under this key."""
    about = _about(key, block.size)
    if row[DIGEST_BYTES:HEADER_BYTES].tobytes() != about:
        return False
    block[:] = row[HEADER_BYTES:]
    digest = _digest(secret, np.frombuffer(about, np.uint8), block)  # of the copy: a row may change
    return hmac.compare_digest(row[:DIGEST_BYTES].tobytes(), digest)


def _about(key: bytes, block_bytes: int) -> bytes:
    assert len(key) == KEY_BYTES
    return FORMAT + block_bytes.to_bytes(8, "little") + key


def _digest(secret: bytes, *parts: Bytes) -> bytes:
    digest = blake3(key=secret)
    for part in parts:
        digest.update(part.data)
    return digest.digest(DIGEST_BYTES)
