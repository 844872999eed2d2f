"""A store keeps, finds and checks blocks, with a real master and real clients."""

import asyncio

import numpy as np
import pytest
from seer_host.contract_checks import flaw_of
from seer_mooncake.store import MooncakeStore
from seer_mooncake.values import HEADER_BYTES, SECRET_BYTES, pack

from seer_core.errors import EngineError
from seer_core.ports.kv import KEY_BYTES, KVPool, StoreContext
from tests.support.eventually import eventually

BLOCK_BYTES = 4096


@pytest.fixture(scope="module")
def a(pool, open_shared):
    return open_shared(pool, "a")


@pytest.fixture(scope="module")
def b(pool, open_shared):
    return open_shared(pool, "b")


def name_of(store, key):
    return store._names([key])[0]


def forged(value, block):
    """Return the value that a forger without the secret would write: another block under the same key."""
    row = np.empty(len(value), np.uint8)
    pack(
        bytes(SECRET_BYTES),
        value[HEADER_BYTES - KEY_BYTES : HEADER_BYTES],
        np.frombuffer(block, np.uint8),
        row,
    )
    return row.tobytes()


def test_what_one_instance_puts_every_instance_gets_in_any_number(pool, a, b, blocks, got):
    assert flaw_of(pool, KVPool) is None
    keys, data = blocks(600)  # the buffer holds 252
    assert b.find(keys) == 0
    assert a.lacks(keys) == list(range(600))
    a.put(keys, data)
    for store in (a, b):
        assert store.find(keys) == 600
        assert store.lacks(keys) == []
        assert np.array_equal(got(store, keys), data)


def test_a_look_up_counts_from_the_first_key_and_ends_at_the_first_miss(pool, a, b, blocks, got):
    before = pool.stats()
    keys, data = blocks(4)
    a.put([keys[0], keys[1], keys[3]], data[[0, 1, 3]])
    assert b.find(keys) == 2
    assert b.lacks(keys) == [2]
    assert np.array_equal(got(b, keys[:2]), data[:2])
    counted = pool.stats().since(before)
    assert (counted.asked_blocks, counted.hit_blocks, counted.torn_blocks) == (4, 2, 0)
    assert (counted.put_bytes, counted.got_bytes) == (3 * BLOCK_BYTES, 2 * BLOCK_BYTES)


def test_no_keys_are_no_question(a):
    assert a.find([]) == a.get([], np.empty((0, BLOCK_BYTES), np.uint8)) == 0
    assert a.lacks([]) == []
    a.put([], np.empty((0, BLOCK_BYTES), np.uint8))
    a.drop([])


@pytest.mark.parametrize(
    "damage",
    [
        lambda value, other: value[:70] + bytes([value[70] ^ 1]) + value[71:],
        lambda value, other: value[:-1] + bytes([value[-1] ^ 128]),
        lambda value, other: bytes([value[0] ^ 1]) + value[1:],
        lambda value, other: value[:2000] + bytes(len(value) - 2000),
        lambda value, other: value[:-1],
        lambda value, other: value + b"x",
        lambda value, other: b"somebody else's",
        lambda value, other: bytes(len(value)),
        lambda value, other: other,
        lambda value, other: forged(value, other[HEADER_BYTES:]),
    ],
    ids=[
        "a bit",
        "the last bit",
        "the checksum",
        "half written",
        "cut off",
        "too long",
        "foreign",
        "empty",
        "other key",
        "forged",
    ],
)
def test_a_value_that_is_not_what_it_should_be_is_a_miss_and_can_be_put_again(
    pool, a, b, raw, blocks, got, damage
):
    keys, data = blocks(3)
    a.put(keys, data)
    names = [name_of(a, key) for key in keys]
    good, other = raw.get(names[1]), raw.get(names[2])
    assert len(good) == BLOCK_BYTES + 64
    # A store that another test has closed may be given the value until the master notices its end.
    eventually(lambda: raw.upsert(names[1], damage(good, other)) == 0)
    before = pool.stats()
    assert b.find(keys) == 3
    assert np.array_equal(got(b, keys), data[:1])
    assert pool.stats().since(before).torn_blocks == 1
    assert b.lacks(keys) == [1]  # and not the damaged one
    b.put([keys[1]], data[1:2])
    assert np.array_equal(got(a, keys), data)


def test_the_secret_is_another_for_each_run_and_on_no_command_line(pool, make_pool, descendants):
    secret = pool.store("a").settings["secret"]
    assert secret == pool.store("b").settings["secret"]
    assert secret != make_pool(("a",)).store("a").settings["secret"]
    assert len(secret) == 2 * SECRET_BYTES
    lines = [" ".join(arguments) for _, arguments in descendants()]
    assert any("mooncake_master" in line for line in lines)
    assert all(secret not in line for line in lines)


def test_a_value_gone_between_look_up_and_copy_is_a_miss(pool, a, b, raw, blocks, got):
    keys, data = blocks(3)
    a.put(keys, data)
    assert b.find(keys) == 3
    assert raw.remove(name_of(a, keys[1]), True) == 0
    assert np.array_equal(got(b, keys), data[:1])


def test_an_instance_with_blocks_of_another_size_never_gets_these(pool, open_store, a, blocks, got):
    small = open_store(pool, "b", block_bytes=2048)
    keys, data = blocks(2)
    a.put(keys, data)
    assert len(got(small, keys, 2048)) == 0


def test_clearing_forgets_everything_and_removes_it(pool, a, b, raw, blocks, got):
    keys, data = blocks(8)
    a.put(keys, data)
    old = [name_of(a, key) for key in keys]
    asyncio.run(pool.clear())
    assert b.find(keys) == a.find(keys) == len(got(a, keys)) == 0
    assert set(raw.batch_is_exist(old)) == {0}
    again = data[::-1].copy()
    a.put(keys, again)
    assert np.array_equal(got(b, keys), again)


def test_what_is_dropped_stays_until_its_room_is_wanted(make_pool, open_store, blocks, got):
    pool = make_pool(("a",), capacity_bytes=16 << 20)
    store = open_store(pool, "a", 65536)
    keys, data = blocks(100, 65536)
    store.put(keys, data)
    store.drop(keys[:50])
    # A sibling shares what is not yet in the way; a busy master's answer that comes too late is a miss.
    assert eventually(lambda: np.array_equal(got(store, keys, 65536), data))
    kept, kept_data = blocks(20, 65536)
    store.put(kept, kept_data)

    def gone():  # a quarter of the memory is too much; what was looked for just now is not removed
        store.drop(keys)
        return pool.stats().released_blocks == 100

    eventually(gone)
    assert store.find(keys) == 0
    assert np.array_equal(got(store, kept, 65536), kept_data)


def test_a_burst_beyond_the_memory_never_waits_long_and_keeps_what_it_says(
    make_pool, open_store, blocks, got
):
    pool = make_pool(("a",), capacity_bytes=16 << 20)
    store = open_store(pool, "a", 65536)
    kept = 0
    for _ in range(10):
        keys, data = blocks(64, 65536)
        store.put(keys, data)
        found = store.find(keys)
        kept += found
        assert np.array_equal(got(store, keys[:found], 65536), data[:found])
    put = pool.stats().put_bytes // 65536
    assert 0 < kept <= put
    assert put + pool.counted("refused_blocks") == 640
    assert pool.stats().torn_blocks == 0


def test_a_full_store_takes_new_blocks_again_and_counts_what_it_evicted(make_pool, open_store, blocks):
    pool = make_pool(("a",), capacity_bytes=16 << 20)
    store = open_store(pool, "a", 65536)
    for _ in range(8):
        store.put(*blocks(64, 65536))

    def taken():
        keys, data = blocks(16, 65536)
        store.put(keys, data)
        return store.find(keys) == 16

    eventually(taken)
    eventually(lambda: pool.stats().evicted_blocks > 100)
    eventually(lambda: 0 < pool.stats().used_bytes <= 16 << 20)


def test_two_runs_share_a_master_and_see_nothing_of_each_other(make_pool, open_store, pool, a, blocks, got):
    guest = make_pool(("a",), master=pool.store("a").settings["master"])
    other = open_store(guest, "a")
    keys, data = blocks(4)
    a.put(keys, data)
    assert other.find(keys) == 0
    other.put(keys, data[::-1].copy())
    assert np.array_equal(got(a, keys), data)
    asyncio.run(guest.clear())
    assert other.find(keys) == 0
    asyncio.run(guest.stop())
    assert a.find(keys) == 4
    assert np.array_equal(got(a, keys), data)


def test_two_runs_with_masters_of_their_own_do_not_meet(make_pool, open_store, pool, a, blocks):
    neighbour = make_pool(("a",))
    assert neighbour.store("a").settings["master"] != pool.store("a").settings["master"]
    other = open_store(neighbour, "a")
    keys, data = blocks(3)
    a.put(keys, data)
    assert other.find(keys) == 0


def test_a_pool_too_small_for_a_block_is_refused_by_the_instance(pool):
    with pytest.raises(EngineError, match="a block of 32 tokens takes 33554432 bytes; raise"):
        MooncakeStore(pool.store("a").settings, StoreContext("a", 32 << 20, 32))


def test_a_store_made_before_an_epoch_began_learns_of_it_when_it_is_connected(make_pool, blocks):
    pool = make_pool(("a", "b"))
    early = MooncakeStore(pool.store("a").settings, StoreContext("a", BLOCK_BYTES, 32))
    asyncio.run(pool.clear())
    late = MooncakeStore(pool.store("b").settings, StoreContext("b", BLOCK_BYTES, 32))
    pool.connect("a", early.receive)
    pool.connect("b", late.receive)
    keys, data = blocks(3)
    early.put(keys, data)
    assert late.find(keys) == 3
    early.close()
    late.close()


def test_what_a_store_has_counted_is_sent_once(pool, a, blocks):
    a.take_message()
    keys, data = blocks(2)
    a.put(keys, data)
    assert a.find(keys) == 2
    assert a.take_message() == {"put_bytes": 2 * BLOCK_BYTES, "asked_blocks": 2, "hit_blocks": 2}
    assert a.take_message() == {}
