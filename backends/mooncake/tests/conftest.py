"""Started pools with masters of their own, and stores in them, in this process and in others."""

import asyncio
import contextlib
import importlib
import json
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest
from seer_mooncake import MooncakePool, Settings
from seer_mooncake.system import installation

from backends.mooncake.tests.store_process import StoreProcess

BLOCK_BYTES = 4096
LONGEST_S = 60.0
"""The largest limits that there are: no test waits for them, and a busy machine may take as long."""
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    """Skip what runs a real Mooncake where it cannot be loaded; ``items`` are those of the whole run."""
    found = installation()
    if not found.ok:
        skip = pytest.mark.skip(reason=f"{found.finding}; {found.remedy}")
        for item in items:
            if item.path.is_relative_to(HERE) and "no_mooncake" not in item.keywords:
                item.add_marker(skip)


def pytest_configure(config):
    """Register the marker of tests that need no Mooncake."""
    config.addinivalue_line("markers", "no_mooncake: needs neither Mooncake nor its libraries")


class Wired(MooncakePool):
    """A pool that receives all messages of its stores here before it counts."""

    def __init__(self, *arguments):
        self.stores = []
        super().__init__(*arguments)

    def opened(self, name, store):
        """Connect a store, beside others that a test has opened under the name."""
        self.stores.append((name, store))
        mine = [each for other, each in self.stores if other == name]
        self.connect(name, lambda note: [each.receive(note) for each in mine if not each.ended])

    def stats(self):
        return self.receive_all() and super().stats()

    def counted(self, name):
        return self.receive_all() and self._counted[name]

    def receive_all(self):
        for name, store in self.stores:
            if not store.ended:
                self.receive(name, store.take_message())
        return True


@contextlib.contextmanager
def pools():
    """Yield a function that starts a pool for these instances; all are stopped, and nothing is left."""
    started = []
    before = set(psutil.Process().children(recursive=True))

    def make(names=("a", "b"), directory=None, **settings):
        own = {"capacity_bytes": 64 << 20, "buffer_bytes": 1 << 20}
        own |= {"start_timeout_s": LONGEST_S, "timeout_s": LONGEST_S}
        pool = Wired(msgspec.convert(own | settings, Settings), directory)
        started.append(pool)
        asyncio.run(pool.start(names))
        return pool

    yield make
    for pool in started:
        asyncio.run(pool.stop())
    assert set(psutil.Process().children(recursive=True)) <= before


@contextlib.contextmanager
def stores():
    """Yield a function that makes an instance's store as its engine would; all end as instances do."""
    opened = []

    def open_store(pool, name, block_bytes=BLOCK_BYTES, **host):
        opened.append(StoreProcess(pool.store(name).settings, name, block_bytes, **host))
        pool.opened(name, opened[-1])
        return opened[-1]

    yield open_store
    for store in opened:
        store.end()


@pytest.fixture
def make_pool():
    """Return a function that starts a pool for these instances, which stops with the test."""
    with pools() as make:
        yield make


@pytest.fixture
def open_store(make_pool):
    """Return a function that makes an instance's store as its engine would, which ends with the test."""
    with stores() as open_store:
        yield open_store


@pytest.fixture(scope="module")
def pool():
    """A pool for two instances, which all tests of a file share."""
    with pools() as make:
        yield make()


@pytest.fixture(scope="module")
def open_shared(pool):
    """Return a function that makes a store in it, which ends with the last test."""
    with stores() as open_store:
        yield open_store


@pytest.fixture
def run_store():
    """Return a function that runs a script with ``store``, another instance's, in a process of its own."""
    processes = []

    def run(pool, name, script, block_bytes=BLOCK_BYTES, prepare=""):
        settings = json.dumps(dict(pool.store(name).settings))
        lines = f"""
import json, sys, time
import numpy as np
{prepare}
from seer_core.ports.kv import StoreContext
from seer_mooncake.store import MooncakeStore
store = MooncakeStore(json.loads({settings!r}), StoreContext({name!r}, {block_bytes}, 32))
def key(n): return n.to_bytes(32, "little")
def block(n): return np.full((1, {block_bytes}), n % 251, np.uint8)
def say(what): print(what, flush=True)
{script}
"""
        processes.append(subprocess.Popen([sys.executable, "-c", lines], stdout=subprocess.PIPE, text=True))
        return processes[-1]

    yield run
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture
def blocks():
    """Return a function that makes keys and blocks of random bytes."""
    random = np.random.default_rng()

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


@pytest.fixture(scope="module")
def raw(pool):
    """A client of Mooncake's own, of the pool that all tests of a file share."""
    client = importlib.import_module("mooncake.store").MooncakeDistributedStore()
    address = pool.store("a").settings["master"]
    assert client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 1 << 20, "tcp", "", address) == 0
    yield client
    client.close()


@pytest.fixture
def descendants():
    """Return a function that lists this process's descendants and their arguments, but for the dead ones."""

    def find():
        found = []
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # a zombie has no arguments
                found.append((process, process.cmdline()))
        return found

    return find


@pytest.fixture
def master_of(descendants):
    """Return a function that finds the process of a pool's master."""

    def find(pool):
        port = pool._master.address.rpartition(":")[2]
        for process, arguments in descendants():
            if f"--rpc_port={port}" in arguments and "mooncake_master" in arguments[0]:
                return process
        return None

    return find
