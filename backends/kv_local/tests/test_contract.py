"""The contract of a KV pool."""

import numpy as np
from seer_kv_local import LocalPool, NodePools
from seer_testing import KVPoolContract

BLOCKS, INSTANCES = 12, 3
TABLE_BYTES, PAGES = 56, 4 * 4096


class TestLocalPool(KVPoolContract):
    def make(self):
        return LocalPool(INSTANCES * (BLOCKS * (self.block_bytes + TABLE_BYTES) + PAGES))


class TestLocalPoolWithADisk(TestLocalPool):
    def make(self):
        size = INSTANCES * (BLOCKS * (self.block_bytes + TABLE_BYTES) + PAGES)
        return LocalPool(size, 2 * size)


class TestNodePools(KVPoolContract):
    def make(self):
        return NodePools(INSTANCES * (BLOCKS * (self.block_bytes + TABLE_BYTES) + PAGES))

    def test_what_was_put_outlives_its_store(self):
        """As long as a neighbour has it open, which is until the instance is back."""
        with self._started() as (pool, open_store):
            keys, blocks = self._blocks(4)
            lost, other = self._store(pool, "a"), open_store("b")
            lost.put(keys, blocks)
            del lost
            assert np.array_equal(self._get(other, keys), blocks)
            open_store("a")
            assert other.find(keys) == 0


class TestNodePoolsWithADisk(TestNodePools):
    def make(self):
        size = INSTANCES * (BLOCKS * (self.block_bytes + TABLE_BYTES) + PAGES)
        return NodePools(size, 2 * size)
