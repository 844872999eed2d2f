"""A store of a pool, while it works and when it has failed."""

import pytest
from seer_worker.process.stores import FailsafeStore


class Frail:
    """A store that fails when it is asked, and at its end if it is to."""

    def __init__(self, flaw=None):
        self.flaw, self.closed = flaw, 0

    def find(self, keys):
        raise OSError("the pool is gone")

    def close(self):
        self.closed += 1
        if self.flaw is not None:
            raise self.flaw


@pytest.mark.parametrize("flaw", [None, RuntimeError("no end")])
def test_a_store_is_closed_once_also_if_it_has_been_given_up(flaw):
    reasons = []
    for asked in (0, 2):
        frail = Frail(flaw)
        store = FailsafeStore(frail, reasons.append)
        for _ in range(asked):
            assert store.find([b"k" * 32]) == 0
        store.close()
        store.close()
        assert frail.closed == 1
        assert store.find([b"k" * 32]) == 0
    assert reasons == ["the KV store failed: OSError: the pool is gone"]
