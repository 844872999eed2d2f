"""The contract of a KV pool."""

from seer_kv_local import LocalPool

from seer_core.testing import KVPoolContract

BLOCKS, INSTANCES = 12, 3
TABLE_BYTES, PAGES = 56, 4 * 4096


class TestLocalPool(KVPoolContract):
    def make(self):
        return LocalPool(INSTANCES * (BLOCKS * (self.block_bytes + TABLE_BYTES) + PAGES))


class TestLocalPoolWithADisk(TestLocalPool):
    def make(self):
        size = INSTANCES * (BLOCKS * (self.block_bytes + TABLE_BYTES) + PAGES)
        return LocalPool(size, 2 * size)
