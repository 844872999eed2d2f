import asyncio
import os
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from seer_host.contract_checks import flaw_of
from seer_kv_local import LocalPool
from seer_kv_local.slot_table import EPOCH_SHIFT, PAGE, Word
from seer_kv_local.store import LocalStore

from seer_core.errors import EngineError, PluginError
from seer_core.ports.kv import KVPool, StoreContext
from tests.support.descriptors import open_files


def test_what_one_instance_puts_every_instance_gets(make_pool, open_store, blocks, got):
    pool = make_pool()
    assert flaw_of(pool, KVPool) is None
    a, b = open_store(pool, "a"), open_store(pool, "b")
    keys, data = blocks(5)
    assert b.find(keys) == 0
    assert a.lacks(keys) == [0, 1, 2, 3, 4]
    a.put(keys, data)
    for store in (a, b, open_store(pool, "c")):
        assert store.find(keys) == 5
        assert store.lacks(keys) == []
        assert np.array_equal(got(store, keys), data)


def test_a_look_up_counts_from_the_first_key_and_ends_at_the_first_miss(make_pool, open_store, blocks, got):
    pool = make_pool()
    a, b = open_store(pool, "a"), open_store(pool, "b")
    keys, data = blocks(4)
    a.put([keys[0], keys[1], keys[3]], data[[0, 1, 3]])
    assert b.find(keys) == 2
    assert b.lacks(keys) == [2]
    assert len(got(b, keys)) == 2
    assert pool.stats().asked_blocks == 4
    assert pool.stats().hit_blocks == 2
    assert pool.stats().got_bytes == 2 * 4096


def test_blocks_of_a_request_may_lie_with_several_instances(make_pool, open_store, blocks, got):
    pool = make_pool()
    keys, data = blocks(6)
    stores = [open_store(pool, name) for name in "abc"]
    for i, store in enumerate(stores):
        store.put(keys[2 * i : 2 * i + 2], data[2 * i : 2 * i + 2])
    assert all(np.array_equal(got(store, keys), data) for store in stores)


def test_a_full_pool_evicts_what_was_used_longest_ago_and_a_prefix_last(make_pool, open_store, blocks, got):
    pool = make_pool(blocks=4)
    a, b = open_store(pool, "a"), open_store(pool, "b")
    old, old_data = blocks(2)
    kept, kept_data = blocks(2)
    a.put(old, old_data)
    a.put(kept, kept_data)
    assert a.lacks(old) == []  # used again, so ``kept`` is the oldest now
    new, new_data = blocks(1)
    a.put(new, new_data)
    assert b.find(kept) == 1
    assert np.array_equal(got(b, old), old_data)
    assert np.array_equal(got(b, new), new_data)
    assert pool.stats().evicted_blocks == 1
    assert pool.stats().used_bytes == 4 * 4096


def test_of_more_blocks_than_fit_the_first_stay(make_pool, open_store, blocks, got):
    pool = make_pool(blocks=4)
    a, b = open_store(pool, "a"), open_store(pool, "b")
    keys, data = blocks(9)
    a.put(keys, data)
    assert np.array_equal(got(b, keys), data[:4])
    assert pool.stats().evicted_blocks == 5


def test_a_block_replaced_after_it_was_found_is_a_miss(make_pool, open_store, blocks, monkeypatch, got):
    pool = make_pool(blocks=4)
    a, b = open_store(pool, "a"), open_store(pool, "b")
    keys, data = blocks(4)
    a.put(keys, data)
    assert b.find(keys) == 4
    a.put(*blocks(4))
    monkeypatch.setattr(b, "_refresh", lambda: None)  # as if the writer came between look-up and copy
    assert len(got(b, keys)) == 0
    assert pool.stats().torn_blocks == 1


def test_a_block_being_written_is_a_miss(make_pool, open_store, blocks, got):
    pool = make_pool()
    a, b = open_store(pool, "a"), open_store(pool, "b")
    keys, data = blocks(2)
    a.put(keys, data)
    assert b.find(keys) == 2
    a._own._gens[a._own._index[keys[1]][0]] = 0
    assert len(got(b, keys)) == 1
    assert open_store(pool, "c").find(keys) == 1


@pytest.mark.parametrize("byte", [0, 2000, 4095])
def test_a_torn_block_is_a_miss_and_can_be_put_again(make_pool, open_store, blocks, got, byte):
    pool = make_pool()
    a, b = open_store(pool, "a"), open_store(pool, "b")
    keys, data = blocks(3)
    a.put(keys, data)
    a._own._blocks.rows[a._own._index[keys[1]][0], byte] ^= 1
    assert b.find(keys) == 3
    assert np.array_equal(got(b, keys), data[:1])
    assert b.lacks(keys) == [1]
    b.put([keys[1]], data[1:2])
    assert np.array_equal(got(b, keys), data)
    assert len(got(a, keys)) == 3


@pytest.mark.parametrize("flips", [[7, 15], [7, 4095], [2007, 2015, 2023, 2031], range(7, 4096, 8)])
def test_top_bits_that_have_flipped_are_noticed_however_many(make_pool, open_store, blocks, got, flips):
    pool = make_pool()
    a, b = open_store(pool, "a"), open_store(pool, "b")
    keys, data = blocks(1)
    a.put(keys, data)
    a._own._blocks.rows[a._own._index[keys[0]][0], list(flips)] ^= 0x80
    assert b.find(keys) == 1
    assert len(got(b, keys)) == 0
    assert pool.stats().torn_blocks == 1


def test_a_block_under_another_key_is_a_miss(make_pool, open_store, blocks, got):
    pool = make_pool()
    a, b = open_store(pool, "a"), open_store(pool, "b")
    keys, data = blocks(1)
    a.put(keys, data)
    a._own._keys[a._own._index[keys[0]][0]] = 0
    assert b.find([bytes(32)]) == 1
    assert len(got(b, [bytes(32)])) == 0


def test_an_instance_with_blocks_of_another_size_has_a_pool_of_its_own(make_pool, open_store, blocks, got):
    pool = make_pool()
    a, b = open_store(pool, "a"), open_store(pool, "b", block_bytes=2048)
    keys, data = blocks(2)
    a.put(keys, data)
    assert b.find(keys) == 0
    other = data[:, :2048].copy()
    b.put(keys, other)
    assert np.array_equal(got(b, keys, 2048), other)
    assert np.array_equal(got(a, keys), data)


def test_clearing_forgets_everything_and_gives_the_memory_back(make_pool, open_store, blocks, got):
    pool = make_pool()
    a, b = open_store(pool, "a"), open_store(pool, "b")
    keys, data = blocks(8)
    a.put(keys, data)
    assert b.find(keys) == 8
    asyncio.run(pool.clear())
    assert a.find(keys) == b.find(keys) == open_store(pool, "c").find(keys) == 0
    assert len(got(b, keys)) == 0
    assert pool.stats().used_bytes == 0
    fd = pool._memory["a"].memory_fd
    assert os.fstat(fd).st_blocks * 512 <= 3 * PAGE  # header, marks and table
    again = data[::-1].copy()
    a.put(keys, again)
    assert np.array_equal(got(b, keys), again)
    assert pool.stats().evicted_blocks == 0


def test_a_block_of_an_older_epoch_is_never_found_even_if_its_memory_stays(make_pool, open_store, blocks):
    pool = make_pool()
    a, b = open_store(pool, "a"), open_store(pool, "b")
    keys, data = blocks(2)
    a.put(keys, data)
    a._own.header[Word.EPOCH] += 1
    assert b.find(keys) == a.find(keys) == open_store(pool, "c").find(keys) == 0


def test_an_instance_that_comes_back_goes_on_with_what_it_had_written(make_pool, open_store, blocks, got):
    pool = make_pool(blocks=4)
    b = open_store(pool, "b")
    keys, data = blocks(3)
    first = open_store(pool, "a")
    first.put(keys, data)
    generations = first._own._gens.tolist()
    second = open_store(pool, "a")
    assert np.array_equal(got(second, keys), data)
    new, new_data = blocks(2)
    second.put(new, new_data)
    assert np.array_equal(got(b, new), new_data)
    assert b.find(keys) == 2  # the last block of the oldest three made room
    written = set(second._own._gens.tolist()) - set(generations)
    assert len(written) == 2
    assert min(written) > max(generations)
    assert max(written) >> EPOCH_SHIFT == 1


def test_an_instance_killed_while_it_writes_leaves_whole_blocks_and_misses(make_pool, open_store, got):
    pool = make_pool(blocks=64)
    settings = dict(pool.store("a").settings)
    script = textwrap.dedent(f"""
        import numpy as np
        from seer_core.ports.kv import StoreContext
        from seer_kv_local.store import LocalStore
        store = LocalStore({settings!r}, StoreContext("a", 4096, 32))
        print("ready", flush=True)
        n = 0
        while True:
            keys = [(n + i).to_bytes(32, "little") for i in range(16)]
            blocks = np.stack([np.full(4096, (n + i) % 251, np.uint8) for i in range(16)])
            store.put(keys, blocks)
            n += 16
    """)
    writer = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert writer.stdout.readline() == b"ready\n"
    b = open_store(pool, "b")
    seen = 0
    for n in range(40_000):  # read while it writes
        key = [n.to_bytes(32, "little")]
        for block in got(b, key):
            assert (block == n % 251).all()
            seen += 1
        if seen > 50:
            break
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    writer.stdout.close()
    c = open_store(pool, "c")
    assert c.find([]) == 0  # it has looked
    held = [key for table in c._tables for key in table._index]
    assert len(held) >= 48
    for key in held:
        [block] = got(c, [key])
        assert (block == int.from_bytes(key, "little") % 251).all()


def test_an_instance_killed_while_it_loads_harms_no_other(make_pool, open_store, blocks, got):
    pool = make_pool(blocks=8)
    a = open_store(pool, "a")
    keys, data = blocks(8)
    a.put(keys, data)
    script = textwrap.dedent(f"""
        import numpy as np
        from seer_core.ports.kv import StoreContext
        from seer_kv_local.store import LocalStore
        store = LocalStore({dict(pool.store("b").settings)!r}, StoreContext("b", 4096, 32))
        keys, into = {keys!r}, np.empty((8, 4096), np.uint8)
        while True:
            assert store.get(keys, into) == 8
            assert store.lacks(keys) == []
            store.drop(keys[4:])
            print("loaded", flush=True)
    """)
    reader = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    for _ in range(50):
        assert reader.stdout.readline() == b"loaded\n"
    reader.send_signal(signal.SIGKILL)
    reader.wait()
    reader.stdout.close()
    assert np.array_equal(got(a, keys), data)
    new, new_data = blocks(4)
    a.put(new, new_data)
    b = open_store(pool, "b")
    assert np.array_equal(got(b, new), new_data)
    assert np.array_equal(got(b, keys[:4]), data[:4])


def test_the_memory_goes_with_the_last_process_even_after_sigkill():
    script = textwrap.dedent("""
        import asyncio, os, time
        import numpy as np
        from seer_core.ports.kv import StoreContext
        from seer_kv_local import LocalPool
        from seer_kv_local.store import LocalStore
        pool = LocalPool(16 << 20)
        asyncio.run(pool.start(["a"]))
        store = LocalStore(pool.store("a").settings, StoreContext("a", 4096, 32))
        store.put([bytes(32)], np.ones((1, 4096), np.uint8))
        print(pool.store("a").settings["tables"]["a"], flush=True)
        time.sleep(600)
    """)
    before = set(os.listdir("/dev/shm"))
    owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    path = owner.stdout.readline().strip()
    assert os.path.exists(path)
    assert "memfd" in os.readlink(path)
    owner.kill()
    owner.wait()
    owner.stdout.close()
    assert not os.path.exists(path)
    assert set(os.listdir("/dev/shm")) <= before


def test_no_other_user_may_open_its_memory_or_its_disk(make_pool):
    settings = make_pool(disk_blocks=8).store("a").settings
    for path in (settings["tables"]["a"], *settings["disks"]["a"]):
        assert os.stat(path).st_mode & 0o077 == 0
        assert os.stat(os.path.dirname(path)).st_mode & 0o077 == 0


def test_a_stopped_pool_has_no_files_open_and_keeps_its_figures(make_pool, open_store, blocks):
    before = open_files("memfd:seer-kv-")
    pool = make_pool()
    a = open_store(pool, "a")
    a.put(*blocks(3))
    a.close()
    asyncio.run(pool.stop())
    asyncio.run(pool.stop())
    assert open_files("memfd:seer-kv-") <= before
    assert pool.stats().put_bytes == 3 * 4096


def test_a_pool_larger_than_memory_is_refused_at_the_start():
    with pytest.raises(
        PluginError, match=r"capacity_bytes is \d+, but only \d+ bytes of memory are available"
    ):
        asyncio.run(LocalPool(1 << 50).start(["a"]))


def test_a_pool_too_small_for_one_block_is_refused_by_the_instance(make_pool, open_store):
    with pytest.raises(EngineError, match="a block of 32 tokens takes 1048576 bytes; raise"):
        open_store(make_pool(), "a", block_bytes=1 << 20)


def test_memory_that_cannot_be_opened_is_named():
    settings = {"tables": {"a": "/proc/1/fd/999999"}, "disks": {}, "nonce": "00" * 16}
    with pytest.raises(EngineError, match=r"the KV pool's memory cannot be opened: .*runtime's machine"):
        LocalStore(settings, StoreContext("a", 4096, 32))


@pytest.mark.parametrize("owner", ["a", "b"])
def test_a_file_that_is_not_the_pool_s_is_neither_mapped_nor_written(make_pool, tmp_path, owner):
    path = tmp_path / "elsewhere"
    content = bytes(range(256)) * 1024
    path.write_bytes(content)
    settings = make_pool().store("a").settings
    settings["tables"][owner] = str(path)
    with pytest.raises(EngineError, match=r"elsewhere is another file than the pool's; .*runtime's machine"):
        LocalStore(settings, StoreContext("a", 4096, 32))
    assert path.read_bytes() == content


def test_a_pool_of_another_run_is_not_taken_for_this_one(make_pool):
    settings, others = (make_pool().store("a").settings for _ in range(2))
    settings["tables"] = others["tables"]
    with pytest.raises(EngineError, match="is another file than the pool's"):
        LocalStore(settings, StoreContext("a", 4096, 32))
