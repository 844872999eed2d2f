"""One instance's part of a tier: slots for blocks, and a table in shared memory of their keys.

One process writes a table, any number read it, and none waits for another.  Four rules make that safe:

- A slot's generation is 0 while it is written, and a number never used before once it is whole.  A reader
  notes the generation, copies the block, and looks again: if the generation is another, it was a miss.
- Beside it stands a checksum of key and block.  It catches what generations cannot: memory whose writes
  arrive in another order, a page that was taken away, a stray write, a disk that forgot.
- A generation begins with the epoch in which it was given.  The pool's owner counts the epoch up in the
  header, and with that one store everything older is gone.
- A slot's mark is the one word that every process may write: a hint for the next eviction, that a generation
  has been released, or used.  A mark for a generation that is gone is ignored.

Files are opened by a process's id and a number, which mean another file on another machine.  So the owner
writes a nonce of its run into the header, and a file without that nonce is not mapped.

Layout: a header of one page, 64-bit words; from the next page's start the marks; from a page's start per slot
a generation, a checksum and a key; from a page's start the blocks, unless a file holds these.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from enum import IntEnum
from typing import Protocol

import numpy as np
import structlog
import xxhash
from numpy.typing import NDArray

from seer_core.errors import ignore_report
from seer_core.ports.kv import KEY_BYTES, Bytes

__all__ = [
    "NONCE_BYTES",
    "PAGE",
    "Bytes",
    "FileBlocks",
    "SlotTable",
    "SlotTableHeader",
    "Word",
    "checksum",
    "slots_in",
]

log = structlog.get_logger("seer")

PAGE = mmap.PAGESIZE
ROW_BYTES = 8 + 8 + KEY_BYTES
MARK_BYTES = 8
WORD_BYTES = 8
EPOCH_SHIFT = 40
NONCE_BYTES = 16
Words = NDArray[np.uint64]


class Word(IntEnum):
    """The header's words.  The owner writes EPOCH and the nonce's, the table's writer all others."""

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
    RELEASED = 10
    ERRORS = 11
    DISK_GOT_BYTES = 12
    NONCE = 13
    NONCE_END = 14


class SlotTableHeader:
    """The first page, as Python integers."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._words: Words = np.frombuffer(memory, np.uint64, len(Word))

    def __getitem__(self, word: Word) -> int:
        return int(self._words[word])

    def __setitem__(self, word: Word, value: int) -> None:
        self._words[word] = value

    def sign(self, nonce: bytes) -> None:
        """Write the nonce, ``NONCE_BYTES`` long, by which a process recognises the file."""
        self._words[Word.NONCE : Word.NONCE_END + 1] = np.frombuffer(nonce, np.uint64)

    def add(self, word: Word, value: int) -> None:
        """Count up a word that this process alone writes."""
        self._words[word] += np.uint64(value)


def slots_in(table_bytes: int, block_bytes: int) -> int:
    """Return how many blocks a table of this size holds."""
    return max(0, (table_bytes - 3 * PAGE) // (block_bytes + ROW_BYTES + MARK_BYTES))


def _whole_pages(size: int) -> int:
    return -(-size // PAGE) * PAGE


def checksum(key: bytes, block: Bytes) -> int:
    """Return 64 bits of XXH3 over key and block."""
    return xxhash.xxh3_64_intdigest(block.data, xxhash.xxh3_64_intdigest(key))


class Blocks(Protocol):
    """Where a table's blocks are; both methods return whether it worked."""

    def read(self, slot: int, into: Bytes) -> bool:
        """Copy a block out."""
        ...

    def write(self, slot: int, block: Bytes) -> bool:
        """Replace a block."""
        ...


class MemoryBlocks:
    """Blocks behind the table."""

    def __init__(self, rows: Bytes) -> None:
        self.rows = rows

    def read(self, slot: int, into: Bytes) -> bool:
        """Copy a block out."""
        np.copyto(into, self.rows[slot])
        return True

    def write(self, slot: int, block: Bytes) -> bool:
        """Replace a block."""
        self.rows[slot] = block
        return True


class FileBlocks:
    """Blocks in a file; failures are counted in ``errors``, and the first is reported to ``report``."""

    def __init__(self, path: str, block_bytes: int, report: Callable[[str], None] = ignore_report) -> None:
        self._fd = os.open(path, os.O_RDWR)
        self._block_bytes, self._report = block_bytes, report
        self.errors = 0

    def read(self, slot: int, into: Bytes) -> bool:
        """Copy a block out."""
        return self._all(os.preadv, slot, into)

    def write(self, slot: int, block: Bytes) -> bool:
        """Replace a block."""
        return self._all(os.pwritev, slot, block)

    def close(self) -> None:
        """Release the descriptor; the file stays open for others."""
        os.close(self._fd)

    def _all(self, move: Callable[..., int], slot: int, block: Bytes) -> bool:
        try:
            moved = move(self._fd, [block], slot * self._block_bytes)
            if moved != self._block_bytes:
                raise OSError(f"{moved} of {self._block_bytes} bytes came through")
        except OSError as error:
            self.errors += 1
            if self.errors == 1:
                log.warning("kv_disk_failed", error=str(error))
                self._report(f"the KV pool's disk failed: {error}; blocks there are lost")
            return False
        return True


class SlotTable:
    """Slots as their readers see them; with ``file`` the blocks are there, and the memory holds the table.

    Raises:
        OSError: the memory cannot be opened, or is not that of the pool with this nonce.
        ValueError: the table is too small for a block.
    """

    def __init__(
        self,
        path: str,
        nonce: bytes,
        block_bytes: int,
        file: FileBlocks | None = None,
        *,
        writable: bool = False,
    ) -> None:
        self.block_bytes = block_bytes
        fd = os.open(path, os.O_RDWR)
        try:
            if os.pread(fd, NONCE_BYTES, WORD_BYTES * Word.NONCE) != nonce:
                raise OSError(f"{path} is another file than the pool's")
            self.slots = slots = slots_in(os.fstat(fd).st_size, block_bytes)
            if slots < 1:
                raise ValueError(f"a block of {block_bytes} bytes does not fit")
            rows = PAGE + _whole_pages(MARK_BYTES * slots)
            begin = rows + _whole_pages(ROW_BYTES * slots)
            access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
            end = begin + (0 if file else block_bytes * slots)
            memory = mmap.mmap(fd, end, mmap.MAP_SHARED, access)
            marks = mmap.mmap(fd, MARK_BYTES * slots, offset=PAGE)
        finally:
            os.close(fd)
        self.header = SlotTableHeader(memory)
        self._marks: Words = np.frombuffer(marks, np.uint64, slots)
        self._gens: Words = np.frombuffer(memory, np.uint64, slots, rows)
        self._sums: Words = np.frombuffer(memory, np.uint64, slots, rows + 8 * slots)
        keys: Bytes = np.frombuffer(memory, np.uint8, KEY_BYTES * slots, rows + 16 * slots)
        self._keys = keys.reshape(slots, KEY_BYTES)
        self._blocks: Blocks
        if file is None:
            blocks: Bytes = np.frombuffer(memory, np.uint8, block_bytes * slots, begin)
            self._blocks = MemoryBlocks(blocks.reshape(slots, block_bytes))
        else:
            self._blocks = file
        self._seen_seq = self._seen_epoch = 0
        self._seen: Words = np.zeros(slots, np.uint64)
        self._held: dict[int, bytes] = {}
        self._index: dict[bytes, tuple[int, int]] = {}

    def __contains__(self, key: bytes) -> bool:
        return key in self._index

    def refresh(self) -> None:
        """Take in what has changed; without a change that is one comparison of two words."""
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
                self._seen[slot] = 0  # it is being written; the next refresh takes it in
                return
            self._held[slot] = key
            self._index[key] = slot, gen
        self._seen[slot] = gen

    def use(self, key: bytes) -> None:
        """Note that a block is still asked for, which replaces an earlier note."""
        self._mark(key, 0)

    def drop(self, key: bytes) -> None:
        """Note that no request needs a block any more."""
        self._mark(key, 1)

    def _mark(self, key: bytes, released: int) -> None:
        place = self._index.get(key)
        if place is not None:
            slot, gen = place
            self._marks[slot] = gen << 1 | released

    def copy(self, key: bytes, into: Bytes) -> bool | None:
        """Copy a block; return False if it is not there, None if it turned out to be torn."""
        place = self._index.get(key)
        if place is None:
            return False
        slot, gen = place
        if int(self._gens[slot]) == gen:
            total = int(self._sums[slot])
            read = self._blocks.read(slot, into)
            if read and int(self._gens[slot]) == gen and total == checksum(key, into):
                return True
        del self._index[key]
        return None

    def _forget(self) -> None:
        self._seen.fill(0)
        self._held.clear()
        self._index.clear()
