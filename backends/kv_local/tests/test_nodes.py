"""Pools on nodes: which stores share, and what becomes of neighbours that end, fail or are no neighbours."""

import asyncio
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from seer_kv_local import NodePools
from seer_kv_local.node_store import NodeStore

from seer_core.errors import EngineError
from seer_core.ports.kv import StoreContext

BLOCK_BYTES = 4096


@pytest.fixture
def pool():
    pool = NodePools(4 << 20)
    asyncio.run(pool.start(["a", "b", "c"]))
    return pool


@pytest.fixture
def start(pool):
    """Return a function that does what an instance does at its start on a node."""
    stores = []

    def start(name, node="here", pool=pool, **host):
        store = NodeStore(pool.store(name).settings, StoreContext(name, BLOCK_BYTES, 32, node=node, **host))
        stores.append(store)
        pool.receive(name, store.take_message())
        pool.connect(name, store.receive)
        return store

    yield start
    for store in stores:
        store.close()


def test_stores_of_one_node_share_and_those_of_another_miss(start, blocks, got):
    a, b, c = start("a"), start("b"), start("c", "there")
    keys, data = blocks(4)
    a.put(keys, data)
    assert np.array_equal(got(b, keys), data)
    assert c.find(keys) == 0
    c.put(keys[:2], data[:2])
    assert np.array_equal(got(c, keys[:2]), data[:2])


def test_an_instance_that_starts_again_on_another_node_shares_there_and_no_longer_here(start, blocks, got):
    a, b, c = start("a"), start("b"), start("c", "there")
    keys, data = blocks(4)
    a.put(keys, data)
    moved = start("a", "there")
    assert b.find(keys) == moved.find(keys) == 0
    moved.put(keys, data)
    assert np.array_equal(got(c, keys), data)
    assert b.find(keys) == 0


def test_an_instance_that_joins_later_is_a_neighbour_and_brings_memory(pool, start, blocks, got):
    a = start("a")
    keys, data = blocks(4)
    a.put(keys, data)
    asyncio.run(pool.add("late"))
    late = start("late")
    assert np.array_equal(got(late, keys), data)
    late.put(*(more := blocks(2)))
    assert np.array_equal(got(a, more[0]), more[1])
    assert pool.stats().capacity_bytes == (4 << 20) + (4 << 20) // 3


def test_a_neighbour_s_table_of_another_epoch_counts_for_nothing(pool, start, blocks):
    a, b = start("a"), start("b")
    keys, data = blocks(3)
    a.put(keys, data)
    assert b.find(keys) == 3
    b.receive({"epoch": 2})  # and a has not got it yet
    assert b.find(keys) == 0
    a.receive({"epoch": 2})
    assert b.find(keys) == a.find(keys) == 0
    a.put(keys, data)
    assert b.find(keys) == 3


def test_a_process_that_has_not_the_run_s_nonce_is_no_neighbour(start, blocks):
    reasons = []
    a, b = start("a"), start("b", report=reasons.append)
    keys, data = blocks(3)
    a.put(keys, data)
    with open(os.devnull, "rb") as other:
        b.receive({"peer": 0, "process": os.getpid(), "memory": other.fileno()})
    assert b.find(keys) == 0
    assert "is another file than the pool's" in reasons[0]
    b.receive({"peer": 0, "process": 1 << 22, "memory": 3})  # one that has ended
    assert b.find(keys) == 0
    assert len(reasons) == 1


def test_what_a_killed_neighbour_put_is_read_until_it_is_back(pool, start, blocks):
    b = start("b")
    script = f"""
import json, sys, time
import numpy as np
from seer_core.ports.kv import StoreContext
from seer_kv_local.node_store import NodeStore
store = NodeStore({dict(pool.store("a").settings)!r}, StoreContext("a", {BLOCK_BYTES}, 32, node="here"))
store.put([bytes(32)], np.full((1, {BLOCK_BYTES}), 7, np.uint8))
print(json.dumps(store.take_message()), flush=True)
time.sleep(600)
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    pool.receive("a", eval(process.stdout.readline()))
    pool.connect("a", lambda message: None)
    assert b.find([bytes(32)]) == 1
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    into = np.zeros((1, BLOCK_BYTES), np.uint8)
    assert b.get([bytes(32)], into) == 1
    assert (into == 7).all()
    start("a")
    assert b.find([bytes(32)]) == 0


def test_a_node_without_the_memory_or_the_disk_is_named(tmp_path):
    for settings, fact in (
        ((1 << 50,), "node here: .* bytes of memory are available; lower it"),
        ((1 << 20, 1 << 60, str(tmp_path)), "node here: the KV pool cannot take"),
        ((1 << 20, 1 << 20, str(tmp_path / "no")), "node here: .*No such file or directory; lower disk"),
    ):
        pool = NodePools(*settings)
        asyncio.run(pool.start(["a"]))
        with pytest.raises(EngineError, match=fact):
            NodeStore(pool.store("a").settings, StoreContext("a", BLOCK_BYTES, 32, node="here"))
