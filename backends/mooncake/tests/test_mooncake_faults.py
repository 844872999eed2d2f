"""Processes that die, hang or fill up: always a miss, never an error, and nothing is left."""

import asyncio
import signal
import subprocess
import sys

import numpy as np
import psutil
import pytest
import seer_mooncake.master
import seer_mooncake.pool
from seer_host.ports import reserved_port
from seer_mooncake import MooncakePool, Settings
from seer_mooncake.store import NoStore

from seer_core.errors import PluginError
from seer_core.ports.kv import StoreContext
from tests.support.eventually import PATIENCE_S, eventually
from tests.support.processes import stopped

BLOCK_BYTES = 4096


def be_impatient(*stores, limit_s=0.5):
    """Let calls of stores wait so long; until then, a busy machine may take as long as it likes."""
    for store in stores:
        store.wait_at_most(limit_s)


def say_ready(after=""):
    return f"{after}\nsay('ready')\ntime.sleep(600)"


def test_a_killed_master_is_a_miss_until_it_is_back_without_its_keys(
    make_pool, open_store, blocks, got, master_of
):
    pool = make_pool()
    reasons = []
    a, b = open_store(pool, "a"), open_store(pool, "b", report=reasons.append)
    keys, data = blocks(20)
    a.put(keys, data)
    assert b.find(keys) == 20
    assert reasons == []
    be_impatient(a, b)
    first = master_of(pool)
    first.kill()
    first.wait()
    eventually(lambda: b.find(keys) == 0)
    assert reasons[0].startswith("the KV pool is away, and everything a miss until it is back: ")
    eventually(lambda: len(got(b, keys)) == 0)
    a.put(keys, data)
    a.drop(keys)
    eventually(lambda: pool.counted("away") > 0)

    def works_again():
        a.put(keys, data)
        return b.find(keys) == 20

    eventually(works_again)
    be_impatient(a, b, limit_s=PATIENCE_S)
    assert np.array_equal(got(b, keys), data)
    assert master_of(pool).pid != first.pid
    before = pool.stats().put_bytes  # without puts that took the master longer than the stores waited
    assert before >= 20 * BLOCK_BYTES
    a.put(*blocks(20))
    assert pool.stats().put_bytes == before + 20 * BLOCK_BYTES


def test_without_a_master_for_good_the_run_goes_on_and_stops(
    make_pool, open_store, blocks, got, master_of, monkeypatch
):
    monkeypatch.setattr(seer_mooncake.master, "RESTARTS", 0)
    pool = make_pool(("a",))
    store = open_store(pool, "a")
    keys, data = blocks(5)
    store.put(keys, data)
    assert store.find(keys) == 5
    be_impatient(store)
    master = master_of(pool)
    master.kill()
    master.wait(PATIENCE_S)
    eventually(lambda: store.find(keys) == 0)
    assert len(got(store, keys)) == 0
    assert store.lacks(keys) == []  # nothing is worth reading from the device
    store.put(keys, data)
    asyncio.run(pool.clear())
    asyncio.run(pool.stop())
    assert pool.stats().put_bytes >= 5 * BLOCK_BYTES


def test_a_master_that_hangs_is_a_miss_and_comes_back(make_pool, open_store, blocks, got, master_of):
    pool = make_pool(("a",))
    store = open_store(pool, "a")
    keys, data = blocks(5)
    store.put(keys, data)
    assert store.find(keys) == 5
    be_impatient(store)
    master_of(pool).suspend()
    eventually(lambda: store.find(keys) == 0)
    assert len(got(store, keys)) == 0
    master_of(pool).resume()

    def works_again():
        store.put(keys, data)
        return store.find(keys) == 5

    eventually(works_again)
    be_impatient(store, limit_s=PATIENCE_S)
    assert np.array_equal(got(store, keys), data)


@pytest.fixture
def closed_port():
    """An address at which no server listens."""
    with reserved_port() as port:
        yield f"127.0.0.1:{port}"


def test_a_master_that_was_never_there_ends_the_run_at_its_start(closed_port):
    pool = MooncakePool(Settings(master=closed_port, start_timeout_s=0.3))
    with pytest.raises(PluginError, match=f'no Mooncake master answers at {closed_port}; start it.*"local"'):
        asyncio.run(pool.start(["a"]))


def test_or_the_run_goes_on_without_a_pool(make_pool, closed_port):
    pool = make_pool(("a",), master=closed_port, start_timeout_s=0.3, on_failure="go_on")
    reasons, spec = [], pool.store("a")
    assert spec.path == "seer_mooncake.store:NoStore"
    NoStore(spec.settings, StoreContext("a", BLOCK_BYTES, 32, reasons.append))
    assert reasons == [f"the run goes on without its KV pool: no Mooncake master answers at {closed_port}"]
    assert pool.stats().capacity_bytes == 0


def test_a_master_of_ours_that_does_not_start_is_named(monkeypatch):
    monkeypatch.setattr(seer_mooncake.pool, "master_binary", lambda: "/bin/false")
    with pytest.raises(PluginError, match=r"did not answer within 0\.3 s; see whether `mooncake_master`"):
        asyncio.run(MooncakePool(Settings(start_timeout_s=0.3)).start(["a"]))


def test_a_store_made_while_there_is_no_master_works_once_there_is_one(
    make_pool, open_store, blocks, master_of
):
    pool = make_pool(("a", "b"), timeout_s=0.5)
    master = master_of(pool)
    master.kill()
    master.wait(PATIENCE_S)
    a = open_store(pool, "a")
    keys, data = blocks(3)

    def works():
        a.put(keys, data)
        return a.find(keys) == 3

    eventually(works)


def test_a_killed_owner_s_blocks_are_misses_and_it_can_come_back(
    make_pool, open_store, run_store, blocks, got
):
    pool = make_pool()
    script = say_ready(
        "store.put([key(n) for n in range(20)], np.concatenate([block(n) for n in range(20)]))"
    )
    owner = run_store(pool, "b", script)
    assert owner.stdout.readline() == "ready\n"
    a = open_store(pool, "a")
    keys = [n.to_bytes(32, "little") for n in range(20)]
    assert len(got(a, keys)) == 20
    owner.kill()
    owner.wait()
    assert len(got(a, keys)) == 0
    eventually(lambda: a.lacks(keys) == list(range(20)))
    again = run_store(pool, "b", script)
    assert again.stdout.readline() == "ready\n"
    found = got(a, keys)
    assert [row[0] for row in found] == list(range(20))


def test_an_owner_that_hangs_delays_no_other(make_pool, open_store, run_store, blocks, got):
    pool = make_pool()
    owner = run_store(pool, "b", say_ready("store.put([key(1)], block(1))"))
    assert owner.stdout.readline() == "ready\n"
    a = open_store(pool, "a")
    assert len(got(a, [(1).to_bytes(32, "little")])) == 1
    owner.send_signal(signal.SIGSTOP)
    eventually(lambda: stopped(owner.pid))
    be_impatient(a)
    assert len(got(a, [(1).to_bytes(32, "little")])) == 0
    assert a.find([(1).to_bytes(32, "little")]) == 0  # away: the call is still out
    owner.send_signal(signal.SIGCONT)
    keys, data = blocks(3)

    def works():
        a.put(keys, data)
        return a.find(keys) == 3

    eventually(works)


def test_a_store_killed_while_it_saves_or_loads_leaves_whole_blocks_and_misses(
    make_pool, open_store, run_store, got
):
    pool = make_pool(("a", "b", "c"))
    saver = run_store(
        pool,
        "b",
        """
say("ready")
n = 0
while True:
    store.put([key(n + i) for i in range(16)], np.concatenate([block(n + i) for i in range(16)]))
    n = (n + 16) % 4096
""",
    )
    loader = run_store(
        pool,
        "c",
        """
say("ready")
into = np.empty((4096, 4096), np.uint8)
while True:
    keys = [key(n) for n in range(4096)]
    store.get(keys[:store.find(keys)], into)
""",
    )
    assert saver.stdout.readline() == loader.stdout.readline() == "ready\n"
    a = open_store(pool, "a")

    def read():
        seen = 0
        for n in range(0, 4096, 64):
            for i, row in enumerate(got(a, [m.to_bytes(32, "little") for m in range(n, n + 64)])):
                assert (row == (n + i) % 251).all()
                seen += 1
        return seen

    eventually(lambda: read() > 1000)
    for process in (loader, saver):
        process.kill()
        read()
        process.wait()
        read()
    eventually(lambda: read() == 0)  # the saver's memory has gone with it


def test_a_killed_runtime_leaves_no_master_and_no_file(tmp_path):
    script = f"""
import asyncio, pathlib, time
from seer_mooncake import MooncakePool, Settings
pool = MooncakePool(Settings(capacity_bytes=16 << 20, disk_bytes=16 << 20), pathlib.Path({str(tmp_path)!r}))
asyncio.run(pool.start(["a"]))
print("ready", flush=True)
time.sleep(600)
"""
    runtime = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert runtime.stdout.readline() == "ready\n"
    children = psutil.Process(runtime.pid).children(recursive=True)  # by id, which says nothing about order
    master, cleanup = sorted(children, key=lambda child: child.name() != "mooncake_master")
    assert master.name() == "mooncake_master"
    assert len(list(tmp_path.iterdir())) == 1
    runtime.kill()
    runtime.wait()
    runtime.stdout.close()
    psutil.wait_procs([cleanup, master], PATIENCE_S)
    assert not cleanup.is_running() or cleanup.status() == psutil.STATUS_ZOMBIE
    assert not master.is_running() or master.status() == psutil.STATUS_ZOMBIE
    assert list(tmp_path.iterdir()) == []


# The disk tier.

DISK_BLOCK = 65536


def disk_pool(make_pool, directory, **settings):
    sizes = {"capacity_bytes": 16 << 20, "disk_bytes": 64 << 20}
    return make_pool(("a",), directory, **(sizes | settings))


def put_slowly(store, keys, data):
    """Put blocks as memory gets free, which offloading makes it."""
    for begin in range(0, len(keys), 16):

        def put(begin=begin):
            lacking = [begin + i for i in store.lacks(keys[begin : begin + 16])]
            store.put([keys[i] for i in lacking], data[lacking])
            return not lacking

        eventually(put)


def test_what_memory_evicts_is_read_from_disk(make_pool, open_store, tmp_path, blocks, got):
    pool = disk_pool(make_pool, tmp_path)
    store = open_store(pool, "a", DISK_BLOCK)
    keys, data = blocks(480, DISK_BLOCK)  # 30 MiB through 16 MiB
    put_slowly(store, keys, data)
    eventually(lambda: pool.stats().disk_used_bytes > 20 << 20)
    found = [np.array_equal(got(store, [key], DISK_BLOCK), data[i : i + 1]) for i, key in enumerate(keys)]
    assert sum(found) > 400
    assert pool.stats().torn_blocks + sum(found) >= 480 - pool.stats().evicted_blocks
    asyncio.run(pool.stop())
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_tier_forgets_the_oldest_and_stays_within_its_size(
    make_pool, open_store, tmp_path, blocks, got
):
    pool = disk_pool(make_pool, tmp_path, disk_bytes=16 << 20)
    store = open_store(pool, "a", DISK_BLOCK)
    keys, data = blocks(640, DISK_BLOCK)
    put_slowly(store, keys, data)
    used = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert used <= 17 << 20
    for i, key in enumerate(keys):
        for row in got(store, [key], DISK_BLOCK):
            assert np.array_equal(row, data[i])


def test_a_disk_that_vanishes_or_takes_nothing_more_costs_misses_only(make_pool, run_store, tmp_path):
    pool = disk_pool(make_pool, tmp_path)
    script = """
import pathlib, shutil
blocks = np.random.default_rng(0).integers(0, 256, (480, 65536), np.uint8)
into = np.empty_like(blocks)
def work(begin, end):
    for n in range(begin, end, 16):
        store.put([key(i) for i in range(n, n + 16)], blocks[n:n + 16])
        time.sleep(0.05)
    good = bad = 0
    for i in range(begin, end):
        n = store.get([key(i)], into[i:i + 1])
        good += n
        bad += n and not np.array_equal(into[i], blocks[i])
    return good, bad
print(work(0, 160), flush=True)
"""
    # a file may grow to 64 KiB only: each write to a bucket fails, as on a disk that is full
    process = run_store(
        pool,
        "a",
        script
        + "shutil.rmtree(store._settings['disk_path'])\nprint(work(160, 320), flush=True)\nstore.close()",
        DISK_BLOCK,
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))",
    )
    lines, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    for line in lines.splitlines():
        good, bad = eval(line)
        assert good > 0  # what memory holds: how much depends on the machine
        assert bad == 0
    assert len(lines.splitlines()) == 2
