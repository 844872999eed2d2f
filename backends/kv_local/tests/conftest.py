"""A started pool, and stores in it."""

import asyncio

import numpy as np
import pytest
from seer_kv_local import LocalPool
from seer_kv_local.store import LocalStore

from seer_core.ports.kv import StoreContext

BLOCK_BYTES = 4096
NAMES = ("a", "b", "c")


@pytest.fixture
def make_pool(tmp_path):
    """Return a function that starts a pool with room for so many blocks per instance in each tier."""
    pools = []

    def bytes_for(blocks, names, block_bytes):
        return len(names) * (blocks * (block_bytes + 56) + 4 * 4096) if blocks else 0

    def make(blocks=8, names=NAMES, block_bytes=BLOCK_BYTES, disk_blocks=0):
        memory, disk = (bytes_for(each, names, block_bytes) for each in (blocks, disk_blocks))
        pool = LocalPool(memory, disk, tmp_path)
        pools.append(pool)
        asyncio.run(pool.start(names))
        return pool

    yield make
    for pool in pools:
        asyncio.run(pool.stop())


@pytest.fixture
def open_store():
    """Return a function that makes an instance's store as its engine would."""

    def open_store(pool, name, block_bytes=BLOCK_BYTES, **host):
        return LocalStore(pool.store(name).settings, StoreContext(name, block_bytes, 32, **host))

    return open_store


@pytest.fixture
def blocks():
    """Return a function that makes keys and blocks of random bytes."""
    random = np.random.default_rng(7)

    def make(count, block_bytes=BLOCK_BYTES):
        keys = [random.bytes(32) for _ in range(count)]
        return keys, random.integers(0, 256, (count, block_bytes), np.uint8)

    return make


@pytest.fixture
def got():
    """Return a function that gets blocks: those up to the first miss."""

    def get(store, keys, block_bytes=BLOCK_BYTES):
        found = np.zeros((len(keys), block_bytes), np.uint8)
        return found[: store.get(keys, found)]

    return get
