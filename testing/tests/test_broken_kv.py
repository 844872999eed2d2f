"""KV pools that break their contract in one way each."""

import re
import sys
from collections import OrderedDict, defaultdict

import msgspec
import numpy as np
import pytest
from seer_testing import KVPoolContract

from seer_core.ports.kv import PoolStats, StoreSpec

BLOCK_BYTES, CAPACITY = 4096, 24
SHELVES = defaultdict(OrderedDict)
FIGURES = defaultdict(lambda: PoolStats(CAPACITY * BLOCK_BYTES))


def count(shelf, **more):
    stats = FIGURES[shelf]
    sums = {name: getattr(stats, name) + number for name, number in more.items()}
    FIGURES[shelf] = msgspec.structs.replace(stats, **sums)


class Store:
    """A store in a pool of this process, in order until broken."""

    def __init__(self, settings, host):
        self.shelf = settings["shelf"]

    @property
    def blocks(self):
        return SHELVES[self.shelf]

    def find(self, keys):
        found = next((i for i, key in enumerate(keys) if key not in self.blocks), len(keys))
        count(self.shelf, asked_blocks=len(keys), hit_blocks=found)
        return found

    def lacks(self, keys):
        return [i for i, key in enumerate(keys) if key not in self.blocks]

    def put(self, keys, blocks):
        for key, block in zip(keys, blocks, strict=True):
            self.blocks[key] = block.copy()
            self.blocks.move_to_end(key)
        while len(self.blocks) > CAPACITY:
            self.blocks.popitem(last=False)
        count(self.shelf, put_bytes=BLOCK_BYTES * len(keys))

    def get(self, keys, blocks):
        found = next((i for i, key in enumerate(keys) if key not in self.blocks), len(keys))
        for i in range(found):
            blocks[i] = self.blocks[keys[i]]
        count(self.shelf, got_bytes=BLOCK_BYTES * found)
        return found

    def drop(self, keys):
        for key in keys:
            self.blocks.pop(key, None)

    def close(self):
        pass


class Pool:
    store_class = Store
    made = 0

    def __init__(self):
        Pool.made += 1
        self.shelf = Pool.made

    async def start(self, instances):
        SHELVES[self.shelf].clear()

    async def stop(self):
        SHELVES[self.shelf].clear()

    def store(self, instance_id):
        return StoreSpec(f"{__name__}:{self.store_class.__name__}", {"shelf": self.shelf})

    async def clear(self):
        SHELVES[self.shelf].clear()

    def stats(self):
        used = BLOCK_BYTES * len(SHELVES[self.shelf])
        return msgspec.structs.replace(FIGURES[self.shelf], used_bytes=used)


class KVPoolInOrder(KVPoolContract):
    patience_s = 0.2
    pool = Pool

    def make(self):
        return self.pool()


class TestPoolInOrder(KVPoolInOrder):
    patience_s = 30.0


def pool(**methods):
    """Return a contract whose pool has other methods."""
    return type("Broken", (KVPoolInOrder,), {"pool": type("BrokenPool", (Pool,), methods)})


def store(name, **methods):
    """Return a contract whose stores have other methods; they are found by this name."""
    found = type(name, (Store,), methods)
    setattr(sys.modules[__name__], name, found)
    return pool(store_class=found)


async def refuse(self):
    raise AssertionError("I have not started")


async def nothing(self):
    pass


async def start_as_it_was(self, instances):
    pass


def keep_views(self, keys, blocks):
    for key, block in zip(keys, blocks, strict=True):
        self.blocks[key] = block


def put_shifted(self, keys, blocks):
    """It mixes up blocks when many come."""
    Store.put(self, keys, np.roll(blocks, 1, axis=0) if len(keys) > 4 else blocks)


def put_for_myself(self, keys, blocks):
    self.mine = dict(zip(keys, blocks.copy(), strict=True))


def get_anything(self, keys, blocks):
    for i, key in enumerate(keys):
        if key in self.blocks:
            blocks[i] = self.blocks[key]
    return sum(key in self.blocks for key in keys)


def get_or_raise(self, keys, blocks):
    assert all(key in self.blocks for key in keys), "no such block"
    return Store.get(self, keys, blocks)


def drop_everything(self, keys):
    self.blocks.clear()


def close_for_all(self):
    self.blocks.clear()


FOUND = "test_a_found_block_is_the_one_that_was_put"

BROKEN = [
    (store("Useless", drop=property()), "test_it_is_a_pool", "it lacks drop"),
    (pool(stop=refuse), "test_before_its_start_it_has_figures_and_can_be_stopped", "not started"),
    (
        pool(store=lambda self, name: StoreSpec("seer_core.ports.kv:KVStore", {"pool": self})),
        "test_what_a_store_is_made_of_is_plain_data",
        "is no plain data",
    ),
    (store("Selfish", put=put_for_myself), "test_what_one_instance_puts_every_instance_gets", ""),
    (store("Patchy", get=get_anything), "test_a_look_up_ends_at_the_first_miss", ""),
    (store("Touchy", get=get_or_raise), "test_a_miss_is_never_an_error", "no such block"),
    (store("Lazy", put=keep_views), "test_it_keeps_copies_and_changes_nothing_it_is_given", ""),
    (store("Mixed", put=put_shifted), FOUND, "other bytes"),
    (pool(stats=lambda self: PoolStats(1)), "test_figures_add_up", ""),
    (pool(clear=nothing), "test_what_is_cleared_is_not_found_again", ""),
    (store("Sweeping", drop=drop_everything), "test_dropping_is_a_hint", ""),
    (store("Final", close=close_for_all), "test_what_was_put_outlives_its_store", ""),
    (
        pool(start=start_as_it_was, stop=nothing),
        "test_it_stops_twice_leaves_nothing_and_starts_again",
        "put before it was stopped",
    ),
]


@pytest.mark.parametrize(("contract", "test", "words"), BROKEN)
def test_the_fault_is_found_and_named(contract, test, words, catches):
    assert re.search(words, catches(contract, test))


def test_every_test_of_the_contract_finds_a_fault(uncaught):
    assert not uncaught(KVPoolContract, BROKEN)
