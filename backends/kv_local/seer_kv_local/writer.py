"""The one writer of a table: which slots are free, and which block is evicted next."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np

from seer_core.ports.kv import KEY_BYTES
from seer_kv_local.slot_table import EPOCH_SHIFT, Bytes, FileBlocks, MemoryBlocks, SlotTable, Word, checksum

__all__ = ["SlotWriter", "Spill"]

Spill = Callable[[int, Sequence[bytes], Sequence[Bytes], Sequence[int]], int]
"""Takes blocks that are about to go, with epoch, keys and checksums; returns how many, from the first on."""


class SlotWriter(SlotTable):
    """A table as its one writer sees it; evicted blocks are offered to ``spill``, if there is one.

    Released blocks are evicted first, and go nowhere; then those used longest ago.  What others have used
    since the last look gets a second chance.  A writer that comes after one that was killed goes on with what
    that one had written.
    """

    def __init__(
        self,
        path: str,
        nonce: bytes,
        block_bytes: int,
        file: FileBlocks | None = None,
        spill: Spill | None = None,
    ) -> None:
        super().__init__(path, nonce, block_bytes, file, writable=True)
        self._spill = spill
        self._broken = False
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
        """Note that a block is still asked for, which replaces an earlier note."""
        if key in self._order:
            self._order.move_to_end(key)
            self._marks[self._order[key]] = 0

    @property
    def epoch(self) -> int:
        """The epoch of what is put now."""
        return self._seen_epoch

    def put(
        self,
        keys: Sequence[bytes],
        blocks: Bytes | Sequence[Bytes],
        sums: Sequence[int] = (),
        epoch: int | None = None,
    ) -> int:
        """Write blocks, return how many; of more than fit the first, without which the others are of no use.

        The others are offered to ``spill``.  ``sums`` are their checksums, or empty.  Blocks of another
        ``epoch`` are not wanted.
        """
        self.refresh()
        if epoch not in (None, self._seen_epoch):
            return 0
        room = min(len(keys), self.slots)
        slots = [self._order.pop(key, None) for key in keys[:room]]
        self._make_room(slots.count(None))
        written = 0
        for position in reversed(range(room)):  # so that the first are the last to be evicted
            key, block, slot = keys[position], blocks[position], slots[position]
            slot = self._free.pop() if slot is None else slot
            total = sums[position] if sums else checksum(key, block)
            if self._broken or not self._write(slot, key, block, total):
                self._broken = True  # a disk that fails once is written no more
                self._free.append(slot)
            else:
                self._order[key] = slot
                written += 1
        self.header.add(Word.PUT_BYTES, written * self.block_bytes)
        spilled = 0
        if self._spill is not None and room < len(keys):
            left = keys[room:], list(blocks[room:])
            totals = sums[room:] or [checksum(*each) for each in zip(*left, strict=True)]
            spilled = self._spill(self.epoch, *left, totals)
        self.header.add(Word.EVICTED, len(keys) - written - spilled)
        self._count()
        return written

    def _make_room(self, wanted: int) -> None:
        """Have so many slots free."""
        if len(self._free) >= wanted:
            return
        self._collect()
        victims: list[tuple[bytes, int]] = []
        while len(self._free) + len(victims) < wanted:
            key, slot = self._order.popitem(last=False)
            gen = int(self._gens[slot])
            if self._marks[slot] == gen << 1:  # another instance has used it
                self._marks[slot] = 0
                self._order[key] = slot
            else:
                victims.append((key, slot))
        self.header.add(Word.EVICTED, len(victims) - self._hand_down(victims[::-1]))
        for _, slot in victims:
            self._clear(slot)

    def _collect(self) -> None:
        """Take back all slots that were released."""
        gens = self._gens
        released = np.flatnonzero((gens != 0) & (self._marks == (gens << np.uint64(1) | np.uint64(1))))
        for slot in released.tolist():
            if self._order.pop(self._held[slot], None) is not None:
                self._clear(slot)
                self.header.add(Word.RELEASED, 1)

    def _hand_down(self, victims: Sequence[tuple[bytes, int]]) -> int:
        """Offer blocks that are about to go to the tier below, return how many it has taken."""
        if self._spill is None or not victims:
            return 0
        assert isinstance(self._blocks, MemoryBlocks)
        rows, slots = self._blocks.rows, [slot for _, slot in victims]
        sums = self._sums[slots].tolist()
        return self._spill(self.epoch, [key for key, _ in victims], [rows[slot] for slot in slots], sums)

    def _clear(self, slot: int) -> None:
        self._gens[slot] = 0
        self._index.pop(self._held.pop(slot), None)
        self._free.append(slot)

    def _write(self, slot: int, key: bytes, block: Bytes, total: int) -> bool:
        self._gens[slot] = 0
        if not self._blocks.write(slot, block):
            return False
        self._keys[slot] = np.frombuffer(key, np.uint8, KEY_BYTES)
        self._sums[slot] = total
        self._seq += 1
        gen = self._seen_epoch << EPOCH_SHIFT | self._seq
        self._gens[slot] = gen
        self._held[slot] = key
        self._index[key] = slot, gen
        return True

    def _count(self) -> None:
        self._seq += 1
        self.header[Word.USED] = len(self._order) * self.block_bytes
        self.header[Word.SEQ] = self._seq
