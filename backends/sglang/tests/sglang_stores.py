"""A KV store with moods, imported by workers."""

import time
from functools import partialmethod
from pathlib import Path

from seer_kv_local.store import LocalStore
from seer_worker.process.pooling import PooledRequests

FETCH = PooledRequests._fetch


def delayed(requests, store, first, keys):
    """Copy blocks, but not while the store is slow; other calls of it go on meanwhile."""
    while store.mood == "is slow":
        time.sleep(0.001)
    return FETCH(requests, first, keys)


class Moody(LocalStore):
    """The local pool's, but for what the file ``mood`` says."""

    def __init__(self, settings, host):
        super().__init__(settings, host)
        self.file = Path(settings["mood"])
        PooledRequests._fetch = partialmethod(delayed, self)

    @property
    def mood(self):
        return self.file.read_text() if self.file.exists() else ""

    def find(self, keys):
        return len(keys) if self.mood == "promises all" else super().find(keys)

    def get(self, keys, blocks):
        if self.mood == "fails":
            raise OSError("the pool is gone")
        if self.mood == "loses all":
            return 0
        return super().get(keys[:-1] if self.mood == "loses the last" else keys, blocks)
