"""Fingerprints in the place of KV: every block holds bytes that only its text could have put there.

A block's fingerprint is that of its last token (``slots.prints_of``), which stands for all tokens before it
and for the weights' version, and the block is filled with bytes made of it.  So every byte of a block that is
loaded, found or overwritten can be checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from seer_core.errors import EngineError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Words = NDArray[np.uint64]

__all__ = ["Fingerprints", "WrongKVError"]

WORD_BYTES = 8


class WrongKVError(EngineError):
    """A block holds something else than the KV that was computed for its text.

    Remedy: the KV pool or the engine's adapter mixed up blocks; mend it, because a real engine
    would compute wrong tokens.
    """


class Fingerprints:
    """The blocks of an instance, in main memory; ``layer`` is the same as a tensor, uint8 [blocks, bytes]."""

    def __init__(self, blocks: int, block_bytes: int) -> None:
        self._words: Words = np.zeros((blocks, block_bytes // WORD_BYTES), np.uint64)
        self._places: Words = np.arange(block_bytes // WORD_BYTES, dtype=np.uint64) * np.uint64(
            0x9E37_79B9_7F4A_7C15
        )
        self.layer = torch.from_numpy(self._words.view(np.uint8))
        self.checked_blocks = 0

    def write(self, block_ids: Sequence[int], prints: Words) -> None:
        """Fill blocks with what these fingerprints stand for."""
        self._words[list(block_ids)] = self._filled(prints)

    def copy(self, source: int, target: int) -> None:
        """Copy a block."""
        self._words[target] = self._words[source]

    def clear(self) -> None:
        """Write zeros over all blocks."""
        self._words.fill(0)

    def check(self, block_ids: Sequence[int], prints: Words, request: str) -> None:
        """Compare every byte of blocks with what these fingerprints stand for.

        Raises:
            WrongKVError: one does not.
        """
        self.checked_blocks += len(prints)
        there = (self._words[list(block_ids)] == self._filled(prints)).all(axis=1)
        if not there.all():
            bad = int(np.flatnonzero(~there)[0])
            raise WrongKVError(
                f"KV block {bad} of {len(prints)} of request {request!r} does not hold the KV of its text;"
                " what moved, evicted or overwrote it is at fault"
            )

    def _filled(self, prints: Words) -> Words:
        return prints[:, None] ^ self._places
