"""Contract of the Protocols in ``seer_core.ports.kv``: a pool and the stores in it."""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seer_core.ports.contracts import implemented
from seer_core.ports.kv import KEY_BYTES, KVPool, KVStore, PoolStats, StoreContext
from seer_testing.support import as_sent, expect_contract, load, run_within

__all__ = ["KVPoolContract"]

Bytes = NDArray[np.uint8]

BLOCK_TOKENS = 32
OPEN_FILES = Path("/proc/self/fd")
NAMES = ("a", "b", "c")


class KVPoolContract:
    """Tests of a ``KVPool`` and its ``KVStore``; ``make`` returns a new pool, not yet started.

    Best a small one, with room for some ten blocks of ``block_bytes`` per instance: then it also evicts.
    """

    block_bytes: int = 4096
    patience_s: float = 30.0
    """Seconds after which a wait has failed."""

    def make(self) -> KVPool:
        """Return a new pool, not yet started."""
        raise NotImplementedError("define make(), which returns a new pool, not yet started")

    def test_it_is_a_pool(self) -> None:
        """Pool and store have the methods of their Protocols."""
        with self._started() as (pool, open_store):
            expect_contract(pool, KVPool)
            expect_contract(open_store("a"), KVStore)

    def test_before_its_start_it_has_figures_and_can_be_stopped(self) -> None:
        """A run that does not get far stops it all the same."""
        pool = self.make()
        assert isinstance(pool.stats(), PoolStats)
        self._run(pool.clear())
        self._run(pool.stop())

    def test_what_a_store_is_made_of_is_plain_data(self) -> None:
        """It travels to another process."""
        with self._started() as (pool, _):
            for name in NAMES:
                spec = pool.store(name)
                assert callable(load(spec.path))
                as_sent(spec.settings)

    def test_what_one_instance_puts_every_instance_gets(self) -> None:
        """The very bytes, also one that opens its store later."""
        with self._started() as (_, open_store):
            a, b = open_store("a"), open_store("b")
            keys, blocks = self._blocks(4)
            assert a.lacks(keys) == [0, 1, 2, 3]
            a.put(keys, blocks)
            for store in (a, b, open_store("c")):
                assert store.find(keys) == 4
                assert store.lacks(keys) == []
                assert np.array_equal(self._get(store, keys), blocks)

    def test_a_look_up_ends_at_the_first_miss(self) -> None:
        """A block is of use only with all before it; ``lacks`` looks at every key."""
        with self._started() as (_, open_store):
            a, b = open_store("a"), open_store("b")
            keys, blocks = self._blocks(4)
            a.put([keys[0], keys[1], keys[3]], blocks[[0, 1, 3]])
            for store in (a, b):
                assert store.find(keys) == 2
                assert store.lacks(keys) == [2]
                assert np.array_equal(self._get(store, keys), blocks[:2])

    def test_a_miss_is_never_an_error(self) -> None:
        """Neither are no keys at all, nor keys put twice."""
        with self._started() as (_, open_store):
            a = open_store("a")
            keys, blocks = self._blocks(3)
            for _ in range(2):
                assert (a.find(keys), a.lacks(keys), len(self._get(a, keys))) == (0, [0, 1, 2], 0)
            a.put([], blocks[:0])
            assert (a.find([]), a.lacks([]), len(self._get(a, []))) == (0, [], 0)
            a.put(keys, blocks)
            a.put(keys, blocks)
            assert np.array_equal(self._get(a, keys), blocks)

    def test_it_keeps_copies_and_changes_nothing_it_is_given(self) -> None:
        """The arrays are the engine's, and are written again at once."""
        with self._started() as (_, open_store):
            a = open_store("a")
            keys, blocks = self._blocks(3)
            theirs, given = list(keys), blocks.copy()
            a.put(theirs, given)
            assert theirs == keys
            assert np.array_equal(given, blocks)
            given[:] = 0
            assert np.array_equal(self._get(a, keys), blocks)

    def test_a_found_block_is_the_one_that_was_put(self) -> None:
        """Also when far more is put than fits, by all at once; then some is missing, and nothing wrong."""
        with self._started() as (pool, open_store):
            stores = [open_store(name) for name in NAMES]
            keys, blocks = self._blocks(240)
            for start in range(0, 240, 8):
                stores[start // 8 % 3].put(keys[start : start + 8], blocks[start : start + 8])
                for store in stores:
                    for number in range(0, start + 8, 7):
                        for found in self._get(store, keys[number : number + 1]):
                            assert np.array_equal(found, blocks[number]), "found other bytes than were put"
            stats = self._stats(pool, *stores)
            assert 0 <= stats.used_bytes <= stats.capacity_bytes, f"{stats}: holds more than its capacity"

    def test_figures_add_up(self) -> None:
        """Counts go on from the start; nothing is found more often than it was looked for."""
        with self._started() as (pool, open_store):
            a, b = open_store("a"), open_store("b")
            keys, blocks = self._blocks(4)
            a.put(keys[:3], blocks[:3])
            before = self._stats(pool, a, b)
            assert before.put_bytes == 3 * self.block_bytes
            b.find(keys)
            self._get(b, keys)
            after = self._stats(pool, a, b)
            assert after.got_bytes - before.got_bytes == 3 * self.block_bytes
            asked, hits = after.asked_blocks - before.asked_blocks, after.hit_blocks - before.hit_blocks
            assert asked >= hits >= 3

    def test_what_is_cleared_is_not_found_again(self) -> None:
        """No store finds it; blocks that are put afterwards are found."""
        with self._started() as (pool, open_store):
            a, b = open_store("a"), open_store("b")
            keys, blocks = self._blocks(3)
            a.put(keys, blocks)
            assert b.find(keys) == 3
            self._run(pool.clear())
            for store in (a, b, open_store("c")):
                assert store.find(keys) == 0
                assert len(self._get(store, keys)) == 0
            again = blocks[::-1].copy()
            a.put(keys, again)
            assert np.array_equal(self._get(b, keys), again)

    def test_dropping_is_a_hint(self) -> None:
        """A dropped block may remain, can be put again, and no other block goes with it."""
        with self._started() as (_, open_store):
            a, b = open_store("a"), open_store("b")
            keys, blocks = self._blocks(4)
            a.put(keys, blocks)
            b.drop([*keys[2:], bytes(KEY_BYTES)])
            b.drop([])
            assert np.array_equal(self._get(a, keys[:2]), blocks[:2])
            found = self._get(b, keys[2:])
            assert np.array_equal(found, blocks[2 : 2 + len(found)])
            b.put(keys[2:], blocks[2:])
            assert np.array_equal(self._get(a, keys), blocks)

    def test_what_was_put_outlives_its_store(self) -> None:
        """Be it closed or lost without a word; and the instance may come back."""
        with self._started() as (pool, open_store):
            keys, blocks = self._blocks(4)
            closed, lost = self._store(pool, "a"), self._store(pool, "b")
            closed.put(keys[:2], blocks[:2])
            closed.close()
            lost.put(keys[2:3], blocks[2:3])
            del lost
            back, other = open_store("a"), open_store("b")
            back.put(keys[3:], blocks[3:])
            assert np.array_equal(self._get(other, keys), blocks)

    def test_it_stops_twice_leaves_nothing_and_starts_again(self) -> None:
        """Nothing of its first life is found in the second."""
        keys, blocks = self._blocks(2)
        with self._started() as (pool, _):
            store = self._store(pool, "a")
            store.put(keys, blocks)
            store.close()
            self._run(pool.stop())
            open_files = _open_files()
            self._run(pool.stop())
            for _ in range(2):
                self._run(pool.start(NAMES))
                again = self._store(pool, "a")
                assert len(self._get(again, keys)) == 0, "found what was put before it was stopped"
                again.close()
                self._run(pool.stop())
            assert _open_files() <= open_files, "leaves files open"

    @contextmanager
    def _started(self) -> Iterator[tuple[KVPool, Callable[[str], KVStore]]]:
        pool = self.make()
        stores: list[KVStore] = []

        def open_store(name: str) -> KVStore:
            stores.append(self._store(pool, name))
            return stores[-1]

        self._run(pool.start(NAMES))
        try:
            yield pool, open_store
        finally:
            for store in stores:
                store.close()
            self._run(pool.stop())

    def _store(self, pool: KVPool, name: str) -> KVStore:
        """Make an instance's store as its engine would; it is not closed."""
        spec = pool.store(name)
        host = StoreContext(name, self.block_bytes, BLOCK_TOKENS, node="here")
        store: KVStore = load(spec.path)(as_sent(spec.settings), host)
        if (receives := implemented(pool, "receive")) is not None and (note := store.take_message()):
            receives(name, as_sent(note))  # before the instance is ready, and so before it is connected
        if (connect := implemented(pool, "connect")) is not None:
            receive = implemented(store, "receive")
            assert receive is not None, f"the store of {name!r} lacks receive, and its pool has connect"
            connect(name, receive)
        return store

    def _stats(self, pool: KVPool, *stores: KVStore) -> PoolStats:
        """Return the pool's figures after it has received the messages of these stores."""
        if (receive := implemented(pool, "receive")) is not None:
            for store in stores:
                receive("a", as_sent(store.take_message()))
        return pool.stats()

    def _run(self, wait: Coroutine[Any, Any, None]) -> None:
        run_within(self.patience_s, wait, "start(), stop() or clear()")

    def _blocks(self, count: int) -> tuple[list[bytes], Bytes]:
        random = np.random.default_rng(7)
        keys = [
            blake2b(number.to_bytes(8, "little"), digest_size=KEY_BYTES).digest() for number in range(count)
        ]
        return keys, random.integers(0, 256, (count, self.block_bytes), np.uint8)

    def _get(self, store: KVStore, keys: Sequence[bytes]) -> Bytes:
        blocks = np.zeros((len(keys), self.block_bytes), np.uint8)
        return blocks[: store.get(keys, blocks)]


def _open_files() -> int:
    """Return how many files this process has open; 0 where that cannot be known."""
    return len(os.listdir(OPEN_FILES)) if OPEN_FILES.exists() else 0
