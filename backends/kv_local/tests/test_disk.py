"""The disk tier: what memory evicts is there; what the disk cannot do is a miss; nothing is left behind."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest
import structlog
from seer_kv_local import LocalPool, spiller
from seer_kv_local.slot_table import FileBlocks, checksum

from seer_core.errors import EngineError, PluginError
from tests.support.descriptors import open_files


class Patient:
    """A store that waits for its disk after every put, so that tests can say which block is where."""

    def __init__(self, store):
        self.store = store
        store._spiller._limit = 64

    def put(self, keys, blocks):
        self.store.put(keys, blocks)
        self.store._spiller.flush()

    def __getattr__(self, name):
        return getattr(self.store, name)


@pytest.fixture
def open_store(open_store):
    """Return a function that makes an instance's store, of the patient kind."""
    return lambda *arguments, **named: Patient(open_store(*arguments, **named))


def broken_by(store, path):
    """Let a store's own disk file be another one."""
    file = FileBlocks(path, 4096)
    store._files.append(file)
    store._spiller._table._blocks = file


def test_what_memory_evicts_is_found_on_disk_by_everybody(make_pool, open_store, blocks, got):
    pool = make_pool(blocks=4, disk_blocks=8)
    a, b = open_store(pool, "a"), open_store(pool, "b")
    keys, data = blocks(10)
    for i in range(0, 10, 2):
        a.put(keys[i : i + 2], data[i : i + 2])
    for store in (a, b, open_store(pool, "a")):
        assert store.find(keys) == 10
        assert store.lacks(keys) == []
        assert np.array_equal(got(store, keys), data)
    stats = pool.stats()
    assert stats.evicted_blocks == stats.torn_blocks == stats.disk_errors == 0
    assert stats.used_bytes == 4 * 4096
    assert stats.disk_used_bytes == stats.disk_put_bytes == 6 * 4096
    assert stats.disk_got_bytes == 3 * 6 * 4096
    assert stats.put_bytes == 10 * 4096


def test_the_disk_is_bounded_and_loses_what_was_used_longest_ago(make_pool, open_store, blocks, got):
    pool = make_pool(blocks=2, disk_blocks=4)
    a, b = open_store(pool, "a"), open_store(pool, "b")
    keys, data = blocks(8)
    for i in range(8):
        a.put(keys[i : i + 1], data[i : i + 1])
    assert b.lacks(keys) == [0, 1]
    assert np.array_equal(got(b, keys[2:]), data[2:])
    assert pool.stats().evicted_blocks == 2
    assert pool.stats().disk_used_bytes == 4 * 4096


def test_what_was_dropped_never_goes_to_disk_and_leaves_it_first(make_pool, open_store, blocks):
    pool = make_pool(blocks=2, disk_blocks=2)
    a, b = open_store(pool, "a"), open_store(pool, "b")
    over, over_data = blocks(2)
    a.put(over, over_data)
    b.drop(over)
    kept, kept_data = blocks(2)
    a.put(kept, kept_data)
    assert pool.stats().disk_put_bytes == 0
    a.put(*blocks(2))
    assert b.find(kept) == 2
    b.drop(kept[:1])
    a.put(*blocks(1))
    assert b.find(kept[1:]) == 1
    assert pool.stats().evicted_blocks == 0
    assert pool.stats().released_blocks == 3


def test_a_response_larger_than_memory_goes_on_on_disk(make_pool, open_store, blocks, got):
    pool = make_pool(blocks=4, disk_blocks=4)
    a, b = open_store(pool, "a"), open_store(pool, "b")
    keys, data = blocks(9)
    a.put(keys, data)
    assert np.array_equal(got(b, keys), data[:8])


def test_a_disk_that_cannot_follow_costs_hits_and_no_wait(make_pool, open_store, blocks):
    pool = make_pool(blocks=8, disk_blocks=64)
    store = open_store(pool, "a").store
    store._spiller._limit = 1
    lock = threading.Lock()
    plain_put = store._spiller._table.put

    def slow_put(*arguments):
        with lock:
            return plain_put(*arguments)

    store._spiller._table.put = slow_put
    with lock:
        for _ in range(4):
            store.put(*blocks(8))
        assert pool.stats().evicted_blocks == 3 * 8 - 1
    store._spiller.flush()
    assert pool.stats().disk_put_bytes == 4096


def test_blocks_that_wait_for_the_disk_while_everything_is_cleared_are_not_found_after(
    make_pool, open_store, blocks
):
    pool = make_pool(blocks=8, disk_blocks=64)
    store = open_store(pool, "a").store
    keys, data = blocks(1)
    epoch = store._own.epoch
    asyncio.run(pool.clear())
    store._spiller.offer(epoch, keys, data, [checksum(keys[0], data[0])])
    store._spiller.flush()
    assert store.find(keys) == 0
    assert pool.stats().disk_put_bytes == 0


def test_clearing_forgets_what_is_on_disk(make_pool, open_store, blocks, got):
    pool = make_pool(blocks=2, disk_blocks=4)
    a, b = open_store(pool, "a"), open_store(pool, "b")
    keys, data = blocks(4)
    a.put(keys[:2], data[:2])
    a.put(keys[2:], data[2:])
    assert b.find(keys) == 4
    asyncio.run(pool.clear())
    assert a.find(keys) == b.find(keys) == open_store(pool, "c").find(keys) == 0
    assert pool.stats().disk_used_bytes == 0
    a.put(keys[:2], data[2:])
    a.put(keys[2:], data[:2])
    assert np.array_equal(got(b, keys), data[[2, 3, 0, 1]])


@pytest.mark.parametrize("byte", [0, 4095])
def test_a_block_the_disk_forgot_is_a_miss(make_pool, open_store, blocks, got, byte):
    pool = make_pool(blocks=1, disk_blocks=4)
    a, b = open_store(pool, "a"), open_store(pool, "b")
    keys, data = blocks(3)
    for i in range(3):
        a.put(keys[i : i + 1], data[i : i + 1])
    slot = a._spiller._table._index[keys[1]][0]
    os.pwrite(pool._disk["a"].disk_fd, bytes([data[1, byte] ^ 1]), slot * 4096 + byte)
    assert np.array_equal(got(b, keys), data[:1])
    assert b.lacks(keys) == [1]
    assert pool.stats().torn_blocks == 1


def test_a_full_disk_costs_hits_and_is_said_once(make_pool, open_store, blocks, got):
    pool = make_pool(blocks=2, disk_blocks=4)
    a, b = open_store(pool, "a"), open_store(pool, "b")
    broken_by(a, "/dev/full")
    keys, data = blocks(8)
    with structlog.testing.capture_logs() as logs:
        for i in range(0, 8, 2):
            a.put(keys[i : i + 2], data[i : i + 2])
        assert b.lacks(keys) == [0, 1, 2, 3, 4, 5]
    assert np.array_equal(got(b, keys[6:]), data[6:])
    assert pool.stats().disk_errors == 1  # it is not tried again
    assert pool.stats().evicted_blocks == 6
    assert [(entry["event"], "No space left" in entry["error"]) for entry in logs] == [
        ("kv_disk_failed", True)
    ]


def test_a_disk_that_cannot_be_read_is_a_miss_and_is_said_once(make_pool, open_store, blocks, got, tmp_path):
    pool = make_pool(blocks=1, disk_blocks=4)
    a = open_store(pool, "a")
    keys, data = blocks(3)
    for i in range(3):
        a.put(keys[i : i + 1], data[i : i + 1])
    os.ftruncate(pool._disk["a"].disk_fd, 0)
    reasons = []
    b = open_store(pool, "b", report=reasons.append)
    with structlog.testing.capture_logs() as logs:
        assert len(got(b, keys)) == 0
        assert len(got(b, keys[1:])) == 0
    assert [reason.startswith("the KV pool's disk failed: ") for reason in reasons] == [True]
    assert np.array_equal(got(b, keys[2:]), data[2:])
    assert pool.stats().disk_errors == 2
    assert [entry["event"] for entry in logs] == ["kv_disk_failed"]


def test_room_that_is_not_there_is_refused_at_the_start(tmp_path):
    pool = LocalPool(1 << 20, 1 << 60, tmp_path)
    with pytest.raises(PluginError, match=r"cannot take \d+ bytes .*disk_path.*lower disk_bytes"):
        asyncio.run(pool.start(["a"]))
    asyncio.run(pool.stop())
    assert not list(tmp_path.iterdir())


def test_a_directory_that_is_not_there_is_named(tmp_path):
    pool = LocalPool(1 << 20, 1 << 20, tmp_path / "nowhere")
    with pytest.raises(PluginError, match=r"nowhere': No such file or directory"):
        asyncio.run(pool.start(["a"]))
    asyncio.run(pool.stop())


def test_a_disk_too_small_for_one_block_is_refused_by_the_instance(make_pool, open_store):
    with pytest.raises(EngineError, match=r"raise .*capacity_bytes.* and disk_bytes"):
        open_store(make_pool(disk_blocks=1, blocks=4096), "a", block_bytes=1 << 20)


def test_room_is_taken_at_the_start_and_no_name_is_left(make_pool, open_store, blocks, tmp_path):
    before = open_files("memfd:seer-kv-", str(tmp_path))
    pool = make_pool(blocks=2, disk_blocks=64)
    assert not list(tmp_path.iterdir())
    assert os.fstat(pool._disk["a"].disk_fd).st_blocks * 512 >= 64 * 4096
    a = open_store(pool, "a")
    a.put(*blocks(2))
    a.put(*blocks(2))
    a.close()
    asyncio.run(pool.stop())
    assert open_files("memfd:seer-kv-", str(tmp_path)) <= before


def test_two_runs_in_one_directory_do_not_meet(make_pool, open_store, blocks, got):
    first, second = make_pool(blocks=1, disk_blocks=4), make_pool(blocks=1, disk_blocks=4)
    a, b = open_store(first, "a"), open_store(second, "a")
    keys, data = blocks(3)
    for i in range(3):
        a.put(keys[i : i + 1], data[i : i + 1])
        b.put(keys[i : i + 1], data[2 - i : 3 - i])
    assert np.array_equal(got(a, keys), data)
    assert np.array_equal(got(b, keys), data[::-1])


def test_an_instance_killed_while_it_spills_leaves_whole_blocks_and_misses(make_pool, open_store, got):
    pool = make_pool(blocks=8, disk_blocks=64)
    script = textwrap.dedent(f"""
        import numpy as np
        from seer_core.ports.kv import StoreContext
        from seer_kv_local.store import LocalStore
        store = LocalStore({dict(pool.store("a").settings)!r}, StoreContext("a", 4096, 32))
        print("ready", flush=True)
        n = 0
        while True:
            keys = [(n + i).to_bytes(32, "little") for i in range(4)]
            blocks = np.stack([np.full(4096, (n + i) % 251, np.uint8) for i in range(4)])
            store.put(keys, blocks)
            n += 4
    """)
    writer = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert writer.stdout.readline() == b"ready\n"
    b = open_store(pool, "b")
    while pool.stats().disk_put_bytes < 200 * 4096:  # its disk has been filled three times over
        for key in [key for table in b._disks for key in table._index][:8]:
            for block in got(b, [key]):
                assert (block == int.from_bytes(key, "little") % 251).all()
        b.find([])
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    writer.stdout.close()
    c = open_store(pool, "c")
    c.find([])
    held = [key for table in c._disks for key in table._index]
    assert len(held) >= 48
    for key in held:
        [block] = got(c, [key])
        assert (block == int.from_bytes(key, "little") % 251).all()


def test_the_file_goes_with_the_last_process_even_after_sigkill(tmp_path):
    script = textwrap.dedent(f"""
        import asyncio, time
        from pathlib import Path
        from seer_kv_local import LocalPool
        pool = LocalPool(1 << 20, 1 << 20, Path({str(tmp_path)!r}))
        asyncio.run(pool.start(["a"]))
        print(pool.store("a").settings["disks"]["a"][1], flush=True)
        time.sleep(600)
    """)
    owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    path = owner.stdout.readline().strip()
    assert os.path.exists(path) or os.readlink(path).endswith("(deleted)")
    owner.kill()
    owner.wait()
    owner.stdout.close()
    assert not os.path.lexists(path)
    assert not list(tmp_path.iterdir())


def test_a_disk_that_is_slower_than_the_end_is_closed_when_all_is_written(
    make_pool, open_store, blocks, got, monkeypatch
):
    monkeypatch.setattr(spiller, "CLOSE_TIMEOUT_S", 0.0)
    pool = make_pool(blocks=2, disk_blocks=4)
    a = open_store(pool, "a").store
    going, disk = threading.Event(), a._spiller._table._blocks
    write = disk.write
    monkeypatch.setattr(disk, "write", lambda slot, block: going.wait() and write(slot, block))
    keys, data = blocks(4)
    for i in range(0, 4, 2):
        a.put(keys[i : i + 2], data[i : i + 2])
    thread = a._spiller._thread
    a.close()
    going.set()
    thread.join()
    assert disk.errors == 0
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(disk._fd)
    assert np.array_equal(got(open_store(pool, "b"), keys), data)
