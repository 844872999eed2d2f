"""Blocks of a KV pool, fetched and saved at once, or beside an engine's steps."""

from concurrent.futures import wait
from errno import EMFILE
from threading import Event

import numpy as np
import pytest
from seer_worker.process import pooling
from seer_worker.process.pooling import PooledRequests
from seer_worker.process.stores import FailsafeStore

BLOCK_BYTES = 4


class Shelf:
    """A store in a dictionary; ``open`` lets its copies begin."""

    def __init__(self):
        self.blocks = {}
        self.calls = []
        self.open = Event()
        self.open.set()
        self.broken = False

    def find(self, keys):
        self.calls.append("find")
        return next((at for at, key in enumerate(keys) if key not in self.blocks), len(keys))

    def lacks(self, keys):
        return [at for at, key in enumerate(keys) if key not in self.blocks]

    def put(self, keys, blocks):
        self.open.wait()
        self.calls.append("put")
        self.blocks |= {key: row.copy() for key, row in zip(keys, blocks, strict=True)}

    def get(self, keys, blocks):
        self.open.wait()
        self.calls.append("get")
        if self.broken:
            raise OSError("the pool is gone")
        for at, key in enumerate(keys):
            if key not in self.blocks:
                return at
            blocks[at] = self.blocks[key]
        return len(keys)

    def drop(self, keys):
        self.calls.append("drop")
        for key in keys:
            self.blocks.pop(key, None)


def keys(count):
    return [bytes([number]) * 32 for number in range(count)]


def rows(*numbers):
    return np.array([[number] * BLOCK_BYTES for number in numbers], np.uint8)


@pytest.fixture
def shelf():
    found = Shelf()
    found.blocks = dict(zip(keys(6), rows(*range(6)), strict=True))
    yield found
    found.open.set()


@pytest.fixture
def requests(shelf, reasons):
    made = PooledRequests(FailsafeStore(shelf, reasons.append), BLOCK_BYTES)
    made.awaited_blocks = 2
    yield made
    shelf.open.set()
    made.close()


@pytest.fixture
def reasons():
    return []


def settle(requests):
    wait([coming for _, coming in requests._coming.values()])


def test_few_blocks_are_there_at_once_and_many_when_they_have_been_copied(requests, shelf):
    assert requests.stage("few", 4, keys(6)[4:]) == 2
    assert np.array_equal(requests.take("few").blocks, rows(4, 5))
    shelf.open.clear()
    assert requests.stage("many", 0, keys(8)) is None
    assert requests.stage("many", 0, keys(8)) is None
    shelf.open.set()
    settle(requests)
    assert requests.stage("many", 0, keys(8)) == 6
    assert requests.stage("many", 0, keys(8)) == 6
    assert np.array_equal(requests.take("many").blocks, rows(*range(6)))
    assert requests.take("many") is None
    assert shelf.calls.count("get") == 2


def test_what_the_engine_has_found_meanwhile_is_not_loaded(requests):
    requests.stage("a", 0, keys(6))
    settle(requests)
    assert requests.stage("a", 2, keys(6)[2:]) == 4
    staged = requests.take("a")
    assert (staged.first, staged.count) == (2, 4)
    assert np.array_equal(staged.blocks, rows(2, 3, 4, 5))
    requests.stage("a", 0, keys(6))
    settle(requests)
    assert requests.stage("a", 6, []) == 0


def test_no_more_is_promised_than_the_last_call_asked_for(requests):
    requests.stage("a", 0, keys(6))
    settle(requests)
    assert requests.stage("a", 0, keys(6)) == 6
    assert requests.stage("a", 1, keys(5)[1:]) == 4
    assert np.array_equal(requests.take("a").blocks, rows(1, 2, 3, 4))


def test_what_the_engine_has_lost_meanwhile_is_copied_too(requests):
    requests.stage("a", 3, keys(6)[3:])
    settle(requests)
    assert requests.stage("a", 3, keys(6)[3:]) == 3
    assert requests.stage("a", 0, keys(6)) is None
    settle(requests)
    assert requests.stage("a", 0, keys(6)) == 6
    assert np.array_equal(requests.take("a").blocks, rows(*range(6)))


def test_a_block_that_is_lost_while_they_are_copied_is_the_end(requests, shelf):
    shelf.open.clear()
    assert requests.stage("a", 0, keys(6)) is None
    del shelf.blocks[keys(6)[4]]
    shelf.open.set()
    settle(requests)
    assert requests.stage("a", 0, keys(6)) == 4


def test_requests_that_wait_hold_no_more_memory_than_allowed_but_one_may(requests, monkeypatch):
    monkeypatch.setattr(pooling, "FETCHED_BYTES", 5 * BLOCK_BYTES)
    assert requests.stage("a", 0, keys(6)) is None
    assert requests.stage("b", 0, keys(3)) is None
    settle(requests)
    assert requests.stage("b", 0, keys(3)) is None
    assert requests.stage("a", 0, keys(6)) == 6
    requests.take("a")
    assert requests.stage("b", 0, keys(3)) is None
    settle(requests)
    assert requests.stage("b", 0, keys(3)) == 3


def test_a_request_that_waits_for_memory_asks_the_store_once(requests, shelf, monkeypatch):
    monkeypatch.setattr(pooling, "FETCHED_BYTES", 5 * BLOCK_BYTES)
    requests.stage("a", 0, keys(6))
    shelf.calls.clear()
    for _ in range(3):
        assert requests.stage("b", 0, keys(3)) is None
    assert shelf.calls.count("find") == 1
    assert requests.stage("b", 1, keys(3)[1:]) == 2
    assert shelf.calls.count("find") == 2
    settle(requests)
    requests.take("a")
    requests.take("b")
    assert requests.stage("b", 0, keys(3)) is None
    assert shelf.calls.count("find") == 3


@pytest.mark.parametrize("count", [2, 6])
def test_blocks_for_which_there_is_no_memory_are_missing(requests, shelf, count, monkeypatch):
    def refuse(*_):
        raise OSError(EMFILE, "Too many open files")

    monkeypatch.setattr("os.memfd_create", refuse)
    requests.shared = True
    requests.stage("a", 0, keys(count))
    settle(requests)
    assert requests.stage("a", 0, keys(count)) == 0
    assert requests.take("a").count == 0
    requests.shared = False
    assert requests.stage("b", 0, keys(2)) == 2


def test_a_request_that_leaves_is_forgotten_while_its_blocks_are_copied(requests, shelf):
    shelf.open.clear()
    requests.stage("a", 0, keys(6))
    assert requests.take("a") is None
    shelf.open.set()
    assert requests.stage("a", 0, keys(3)) is None
    settle(requests)
    assert requests.stage("a", 0, keys(3)) == 3


def test_a_store_that_fails_while_blocks_are_copied_costs_them_and_is_given_up(requests, shelf, reasons):
    shelf.broken = True
    assert requests.stage("a", 0, keys(6)) is None
    settle(requests)
    assert requests.stage("a", 0, keys(6)) == 0
    assert reasons == ["the KV store failed: OSError: the pool is gone"]
    assert requests.stage("b", 0, keys(6)) == 0


@pytest.mark.parametrize("shared", [False, True])
def test_blocks_are_copied_in_pieces_and_also_into_shared_memory(requests, shelf, shared, monkeypatch):
    monkeypatch.setattr("seer_worker.process.stores.GET_BYTES", 2 * BLOCK_BYTES)
    requests.shared = shared
    requests.stage("a", 0, keys(6))
    settle(requests)
    assert requests.stage("a", 1, keys(6)[1:]) == 5
    assert np.array_equal(requests.take("a").blocks, rows(1, 2, 3, 4, 5))
    assert shelf.calls.count("get") == 3
    assert requests.stage("b", 6, []) == 0


def test_what_is_saved_beside_is_put_before_anything_after_it(requests, shelf):
    shelf.open.clear()
    requests.save_beside(keys(8), rows(*range(8)))
    assert keys(8)[7] not in shelf.blocks
    shelf.open.set()
    requests.save(keys(9), lambda lacking: rows(*lacking))
    assert shelf.calls == ["put", "put"]
    requests.save_beside(keys(10), rows(*range(10)))
    requests.drop(keys(10))
    assert shelf.calls == ["put", "put", "put", "drop"]
    assert not shelf.blocks


def test_where_nothing_is_beside_all_is_there_at_once(requests, shelf):
    requests.awaited_blocks = None
    assert requests.stage("a", 0, keys(6)) == 6
    requests.save_beside(keys(7), rows(*range(7)))
    assert keys(7)[6] in shelf.blocks
