"""What the pool and its stores share: the epoch, and what each store has counted."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

__all__ = ["Control", "Counts", "Word"]

ROW_WORDS = 16


class Word(IntEnum):
    """What a store counts, one 64-bit word each."""

    ASKED = 0
    HIT = 1
    TORN = 2
    REFUSED = 3
    PUT_BYTES = 4
    GOT_BYTES = 5
    RELEASED = 6
    AWAY = 7


class Counts:
    """A store's view: it writes its own row and reads the epoch."""

    def __init__(self, path: str, row: int) -> None:
        fd = os.open(path, os.O_RDWR)
        try:
            words = _words(mmap.mmap(fd, 0))
        finally:
            os.close(fd)
        self._epoch, self._row = words[0], words[1 + row]

    @property
    def epoch(self) -> int:
        """Return the pool's epoch."""
        return int(self._epoch[0])

    def add(self, word: Word, value: int) -> None:
        """Count up."""
        self._row[word] += np.uint64(value)


class Control:
    """The pool's view: an anonymous memory file, which goes with the last process that holds it."""

    def __init__(self, instances: Sequence[str]) -> None:
        self.rows = {name: row for row, name in enumerate(instances)}
        self._fd = os.memfd_create("seer-mooncake", os.MFD_CLOEXEC)
        os.fchmod(self._fd, 0o600)
        os.ftruncate(self._fd, (1 + len(instances)) * ROW_WORDS * 8)
        self._words = _words(mmap.mmap(self._fd, 0))

    @property
    def path(self) -> str:
        """Return where processes of this machine open it while this one lives."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def next_epoch(self) -> None:
        """Begin a new epoch."""
        self._words[0, 0] += np.uint64(1)

    def total(self, word: Word) -> int:
        """Add up what all stores have counted."""
        return int(self._words[1:, word].sum())

    def close(self) -> None:
        """Let go of the file; the figures stay."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


def _words(memory: mmap.mmap) -> NDArray[np.uint64]:
    words: NDArray[np.uint64] = np.frombuffer(memory, np.uint64)
    return words.reshape(-1, ROW_WORDS)
