"""The pool of several ranks: one store, asked by rank 0 alone, and parts that each rank copies."""

from multiprocessing import Pipe
from threading import Thread

import numpy as np
import pytest
from seer_sglang.ranked_pool import FollowingPool, LeadingPool
from seer_sglang.ranks import FollowingRank, LeadingRank
from seer_worker.process.kv_parts import KvParts
from seer_worker.process.stores import FailsafeStore

from seer_core.errors import EngineError
from tests.support.eventually import PATIENCE_S

PART = 8
KEYS = [bytes([i]) * 32 for i in range(4)]


class Store:
    """Keeps everything, and counts what is asked."""

    def __init__(self):
        self.blocks, self.asked = {}, 0

    def find(self, keys):
        self.asked += 1
        return next((i for i, key in enumerate(keys) if key not in self.blocks), len(keys))

    def lacks(self, keys):
        return [i for i, key in enumerate(keys) if key not in self.blocks]

    def put(self, keys, blocks):
        self.blocks |= zip(keys, blocks.copy(), strict=True)

    def get(self, keys, blocks):
        for i, key in enumerate(keys):
            blocks[i] = self.blocks[key]
        return len(keys)

    def drop(self, keys):
        for key in keys:
            self.blocks.pop(key, None)


class Pools:
    """A pool of two ranks in two threads; what is called is called in both."""

    def __init__(self, parts, awaited=None):
        self.store, self.reasons = Store(), []
        here, there = Pipe()
        leader = LeadingRank()
        leader.count, leader._others = 2, [(None, here)]
        kv = KvParts("sglang", 2, parts)
        store = FailsafeStore(self.store, self.reasons.append)
        self.leading = LeadingPool(store, PART, leader, kv, awaited)
        self.following = FollowingPool(PART, FollowingRank(1, 2, there), kv)

    def both(self, method, *arguments, second=None):
        """Return what a method returns in both ranks; rank 1 has the arguments ``second``, or the same."""
        answers = []

        def follow():
            answers.append(getattr(self.following, method)(*(second or arguments)))

        thread = Thread(target=follow)
        thread.start()
        try:
            mine = getattr(self.leading, method)(*arguments)
        finally:
            thread.join(PATIENCE_S)
        assert not thread.is_alive()
        return mine, *answers


def blocks(seed, count=4):
    return np.random.default_rng(seed).integers(0, 256, (count, PART)).astype(np.uint8)


def reader(rows, asked):
    def read(places):
        asked.append(places)
        return rows[places]

    return read


def test_a_block_has_the_parts_of_both_and_each_loads_its_own():
    pools, zero, one, asked = Pools(2), blocks(0), blocks(1), [[], []]
    pools.store.blocks[KEYS[1]] = np.zeros(2 * PART, np.uint8)
    readers = [reader(rows, each) for rows, each in zip((zero, one), asked, strict=True)]
    pools.both("save", KEYS, readers[0], second=(KEYS, readers[1]))
    assert asked == [[[0, 2, 3]], [[0, 2, 3]]]  # what the store lacks, in both
    del pools.store.blocks[KEYS[1]]
    pools.both("save_beside", KEYS[1:2], zero[1:2], second=(KEYS[1:2], one[1:2]))
    assert pools.both("stage", "r", 0, KEYS) == (4, 4)
    assert pools.store.asked == 1
    mine, theirs = pools.both("load", "r")
    assert (mine == zero).all()
    assert (theirs == one).all()
    pools.both("save", KEYS, readers[0], second=(KEYS, readers[1]))
    assert len(asked[0]) == len(asked[1]) == 1  # nothing was lacking


def test_a_part_that_both_have_is_written_by_the_first_alone():
    pools, zero, asked = Pools(1), blocks(0), [[], []]
    readers = [reader(zero, each) for each in asked]
    pools.both("save", KEYS, readers[0], second=(KEYS, readers[1]))
    assert asked == [[[0, 1, 2, 3]], []]
    assert pools.both("stage", "r", 0, KEYS) == (4, 4)
    mine, theirs = pools.both("load", "r")
    assert (mine == zero).all()
    assert (theirs == zero).all()
    assert next(iter(pools.store.blocks.values())).nbytes == PART


def test_both_wait_while_blocks_are_copied():
    pools = Pools(2, awaited=0)
    pools.both("save", KEYS, blocks(0).__getitem__, second=(KEYS, blocks(1).__getitem__))
    assert pools.both("stage", "r", 0, KEYS) == (None, None)
    pools.leading._coming["r"][1].result(PATIENCE_S)
    assert pools.both("stage", "r", 0, KEYS) == (4, 4)
    pools.leading.close()


@pytest.mark.parametrize(("method", "rank"), [("save", 0), ("save", 1), ("save_beside", 1)])
def test_a_rank_that_cannot_copy_its_part_costs_the_store_alone(method, rank):
    pools = Pools(2)

    def fail(places):
        raise OSError("no memory left")

    given = [blocks(0).__getitem__, blocks(1).__getitem__] if method == "save" else [blocks(0), blocks(1)]
    given[rank] = fail if method == "save" else blocks(2, count=3)  # of another shape
    pools.both(method, KEYS, given[0], second=(KEYS, given[1]))
    assert pools.store.blocks == {}
    assert len(pools.reasons) == 1
    assert ("rank 1 cannot read its part of the KV" in pools.reasons[0]) == (rank == 1)
    assert pools.both("stage", "r", 0, KEYS) == (0, 0)
    pools.leading.close()


def test_answers_name_the_rank_that_could_not_do_its_part():
    pools = Pools(2)
    pools.following._ranks.answer(None)
    assert pools.leading._ranks.answers() == [None]
    pools.following._write(np.zeros((1, 2 * PART), np.uint8), lambda: 1 / 0)
    with pytest.raises(EngineError, match="rank 1 cannot read its part of the KV: ZeroDivisionError"):
        pools.leading._ranks.answers()
