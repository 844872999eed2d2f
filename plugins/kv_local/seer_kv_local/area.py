"""One instance's part of the pool: a memory file with slots for blocks, and a table that says what they hold.

One process writes an area, any number read it, and nobody waits for anybody.  What makes that safe:

- A slot's generation is 0 while it is written, and a number never used before once it is whole.  A reader
  notes the generation, copies the block, and looks again: if the generation is another, it was a miss.
- Beside it stands a checksum of key and block.  It catches what generations cannot: memory whose writes
  arrive in another order, a page that was taken away, a stray write.
- A generation begins with the epoch in which it was given.  The pool's owner counts the epoch up in the
  header, and with that one store everything older is gone.

Layout: a header of one page, 64-bit words; then per slot a generation, a checksum and a key; then, from a
page's start, the blocks.
"""

from __future__ import annotations

import mmap
import os
from collections import OrderedDict
from collections.abc import Sequence
from enum import IntEnum
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from seer_core.kv import KEY_BYTES

__all__ = ["PAGE", "Area", "Header", "Word", "Writer", "checksum", "slots_in"]

PAGE = mmap.PAGESIZE
ROW_BYTES = 8 + 8 + KEY_BYTES
EPOCH_SHIFT = 40

Bytes = NDArray[np.uint8]
Words = NDArray[np.uint64]


class Word(IntEnum):
    """The header's words.  The owner writes EPOCH, the area's writer all others."""

    EPOCH = 0
    BLOCK_BYTES = 1
    SEQ = 2
    USED = 3
    ASKED = 4
    HIT = 5
    TORN = 6
    EVICTED = 7
    PUT_BYTES = 8
    GOT_BYTES = 9


class Header:
    """The first page, as Python integers."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._words: Words = np.frombuffer(memory, np.uint64, len(Word))

    def __getitem__(self, word: Word) -> int:
        return int(self._words[word])

    def __setitem__(self, word: Word, value: int) -> None:
        self._words[word] = value

    def add(self, word: Word, value: int) -> None:
        """Count up a word that this process alone writes."""
        self._words[word] += np.uint64(value)


def slots_in(area_bytes: int, block_bytes: int) -> int:
    """Return how many blocks an area of this size holds."""
    return max(0, (area_bytes - 2 * PAGE) // (block_bytes + ROW_BYTES))


@lru_cache(maxsize=4)
def _multipliers(words: int) -> Words:
    random = np.random.default_rng(0x5EE2)
    return random.integers(0, 2**64, words, np.uint64) | np.uint64(1)


def checksum(key: bytes, block: Bytes) -> int:
    """Return 64 bits of multilinear hash: any change of one word shows, of several all but surely.

    It takes a fifth of the time of zlib's CRC.
    """
    words = block.view(np.uint64)
    return (int(words @ _multipliers(words.size)) + int.from_bytes(key[:8], "little")) % 2**64


class Area:
    """An area as its readers see it."""

    def __init__(self, path: str, block_bytes: int, *, writable: bool = False) -> None:
        if block_bytes % 8:
            raise ValueError(f"blocks of {block_bytes} bytes; it must be a multiple of 8")
        self.block_bytes = block_bytes
        fd = os.open(path, os.O_RDWR if writable else os.O_RDONLY)
        try:
            access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
            memory = mmap.mmap(fd, 0, mmap.MAP_SHARED, access)
        finally:
            os.close(fd)
        self.header = Header(memory)
        self.slots = slots = slots_in(len(memory), block_bytes)
        self._gens: Words = np.frombuffer(memory, np.uint64, slots, PAGE)
        self._sums: Words = np.frombuffer(memory, np.uint64, slots, PAGE + 8 * slots)
        keys: Bytes = np.frombuffer(memory, np.uint8, KEY_BYTES * slots, PAGE + 16 * slots)
        self._keys = keys.reshape(slots, KEY_BYTES)
        begin = -(-(PAGE + ROW_BYTES * slots) // PAGE) * PAGE
        blocks: Bytes = np.frombuffer(memory, np.uint8, block_bytes * slots, begin)
        self._blocks = blocks.reshape(slots, block_bytes)
        self._seen_seq = self._seen_epoch = 0
        self._seen: Words = np.zeros(slots, np.uint64)
        self._held: dict[int, bytes] = {}
        self._index: dict[bytes, tuple[int, int]] = {}

    def __contains__(self, key: bytes) -> bool:
        return key in self._index

    def refresh(self) -> None:
        """Take in what has changed; costs one comparison of two words if nothing has."""
        epoch, seq = self.header[Word.EPOCH], self.header[Word.SEQ]
        if (epoch, seq) == (self._seen_epoch, self._seen_seq):
            return
        if epoch != self._seen_epoch or self.header[Word.BLOCK_BYTES] != self.block_bytes:
            self._forget()
            self._seen_epoch = epoch
            if self.header[Word.BLOCK_BYTES] != self.block_bytes:
                return  # not written yet, or by an instance with other blocks: all misses
        gens = self._gens.copy()
        for slot in np.flatnonzero(gens != self._seen).tolist():
            self._take_in(slot, int(gens[slot]))
        self._seen_seq = seq

    def _take_in(self, slot: int, gen: int) -> None:
        old = self._held.pop(slot, None)
        if old is not None and self._index.get(old, (-1, 0))[0] == slot:
            del self._index[old]
        if gen >> EPOCH_SHIFT == self._seen_epoch:
            key = self._keys[slot].tobytes()
            if int(self._gens[slot]) != gen:
                self._seen[slot] = 0  # it changes under our eyes; the next look will tell
                return
            self._held[slot] = key
            self._index[key] = slot, gen
        self._seen[slot] = gen

    def copy(self, key: bytes, into: Bytes) -> bool | None:
        """Copy a block; return False if it is not there, None if it turned out to be torn."""
        place = self._index.get(key)
        if place is None:
            return False
        slot, gen = place
        if int(self._gens[slot]) == gen:
            total = int(self._sums[slot])
            np.copyto(into, self._blocks[slot])
            if int(self._gens[slot]) == gen and total == checksum(key, into):
                return True
        del self._index[key]
        return None

    def _forget(self) -> None:
        self._seen.fill(0)
        self._held.clear()
        self._index.clear()


class Writer(Area):
    """An area as its one writer sees it; blocks are evicted in the order of their last use.

    A writer that comes after one that was killed goes on with what that one had written.
    """

    def __init__(self, path: str, block_bytes: int) -> None:
        super().__init__(path, block_bytes, writable=True)
        self._order: OrderedDict[bytes, int] = OrderedDict()
        self._free: list[int] = []
        self._seq = self.header[Word.SEQ]
        if self.header[Word.BLOCK_BYTES] != block_bytes:
            self.header[Word.BLOCK_BYTES] = 0
            self._gens.fill(0)
            self._count()
            self.header[Word.BLOCK_BYTES] = block_bytes
        self.refresh()

    def refresh(self) -> None:
        """Begin anew if the epoch has changed, with what the table holds of it."""
        epoch = self.header[Word.EPOCH]
        if epoch == self._seen_epoch:
            return
        self._forget()
        self._seen_epoch = epoch
        self._order.clear()
        gens = self._gens.copy()
        alive = (gens >> np.uint64(EPOCH_SHIFT)) == epoch
        self._gens[~alive] = 0
        self._free = np.flatnonzero(~alive)[::-1].tolist()
        for slot in sorted(np.flatnonzero(alive).tolist(), key=gens.__getitem__):
            self._take_in(slot, int(gens[slot]))
            self._order[self._held[slot]] = slot
            self._seq = max(self._seq, int(gens[slot]) & ((1 << EPOCH_SHIFT) - 1))
        self._count()

    def use(self, key: bytes) -> None:
        """Note that a block has been asked for."""
        if key in self._order:
            self._order.move_to_end(key)

    def put(self, keys: Sequence[bytes], blocks: Bytes) -> None:
        """Write blocks; of more than fit the first stay, for without them the others are of no use."""
        self.refresh()
        room = min(len(keys), self.slots)
        for position in reversed(range(room)):  # so that the first are the last to be evicted
            key = keys[position]
            if key in self._order:
                slot = self._order.pop(key)
            elif self._free:
                slot = self._free.pop()
            else:
                old, slot = self._order.popitem(last=False)
                self._index.pop(old, None)
                self.header.add(Word.EVICTED, 1)
            self._write(slot, key, blocks[position])
            self._order[key] = slot
        self.header.add(Word.PUT_BYTES, room * self.block_bytes)
        self._count()

    def _write(self, slot: int, key: bytes, block: Bytes) -> None:
        self._gens[slot] = 0
        self._blocks[slot] = block
        self._keys[slot] = np.frombuffer(key, np.uint8)
        self._sums[slot] = checksum(key, self._blocks[slot])
        self._seq += 1
        gen = self._seen_epoch << EPOCH_SHIFT | self._seq
        self._gens[slot] = gen
        self._held[slot] = key
        self._index[key] = slot, gen

    def _count(self) -> None:
        self._seq += 1
        self.header[Word.USED] = len(self._order) * self.block_bytes
        self.header[Word.SEQ] = self._seq
