"""The order of eviction: dropped blocks first, then those used longest ago, by any instance."""

import asyncio

import numpy as np


def test_what_any_instance_drops_is_evicted_before_what_is_older(make_pool, open_store, blocks, got):
    pool = make_pool(blocks=4)
    a, b, c = (open_store(pool, name) for name in "abc")
    old, old_data = blocks(2)
    over, over_data = blocks(2)
    a.put(old, old_data)
    a.put(over, over_data)
    b.drop(over)
    assert c.find(over) == 2  # a hint: nothing goes before its room is wanted
    new, new_data = blocks(1)
    a.put(new, new_data)
    assert np.array_equal(got(c, old), old_data)
    assert np.array_equal(got(c, new), new_data)
    assert c.find(over) == a.find(over) == 0
    assert pool.stats().released_blocks == 2
    assert pool.stats().evicted_blocks == 0
    assert pool.stats().used_bytes == 3 * 4096


def test_blocks_of_a_response_that_moved_are_released_wherever_they_lie(make_pool, open_store, blocks):
    pool = make_pool(blocks=2)
    stores = [open_store(pool, name) for name in "abc"]
    keys, data = blocks(6)
    for i, store in enumerate(stores):
        store.put(keys[2 * i : 2 * i + 2], data[2 * i : 2 * i + 2])
    stores[2].drop(keys)
    for store in stores:
        store.put(*blocks(1))
    assert pool.stats().released_blocks == 6
    assert pool.stats().evicted_blocks == 0


def test_a_release_of_what_was_replaced_since_harms_none(make_pool, open_store, blocks, monkeypatch, got):
    pool = make_pool(blocks=2)
    a, b = open_store(pool, "a"), open_store(pool, "b")
    old, old_data = blocks(2)
    a.put(old, old_data)
    assert b.find(old) == 2
    new, new_data = blocks(2)
    a.put(new, new_data)
    monkeypatch.setattr(b, "_refresh", lambda: None)  # as if the writer came between look-up and mark
    b.drop(old)
    a.put(*blocks(1))
    assert pool.stats().released_blocks == 0
    assert a.find(new) == 1


def test_a_dropped_block_that_an_instance_uses_again_is_kept(make_pool, open_store, blocks):
    pool = make_pool(blocks=3)
    a, b = open_store(pool, "a"), open_store(pool, "b")
    keys, data = blocks(2)
    older, older_data = blocks(1)
    a.put(older, older_data)
    a.put(keys, data)
    a.drop(keys)
    assert b.lacks(keys[:1]) == []
    a.put(*blocks(2))
    assert b.find(keys[:1]) == 1
    assert pool.stats().released_blocks == 1
    assert pool.stats().evicted_blocks == 1


def test_use_by_another_instance_counts_too(make_pool, open_store, blocks):
    pool = make_pool(blocks=4)
    a, b = open_store(pool, "a"), open_store(pool, "b")
    keys, data = blocks(4)
    a.put(keys[:2], data[:2])
    a.put(keys[2:], data[2:])
    assert b.lacks(keys[:2]) == []
    a.put(*blocks(2))
    assert b.find(keys[:2]) == 2
    assert b.lacks(keys[2:]) == [0, 1]
    a.put(*blocks(2))  # no instance has used them since
    assert b.find(keys[:2]) == 0


def test_what_was_dropped_before_the_weights_changed_is_not_released_after(make_pool, open_store, blocks):
    pool = make_pool(blocks=2)
    a = open_store(pool, "a")
    keys, data = blocks(2)
    a.put(keys, data)
    a.drop(keys)
    asyncio.run(pool.clear())
    a.put(keys, data)
    a.put(*blocks(1))
    assert pool.stats().released_blocks == 0
    assert pool.stats().evicted_blocks == 1


def test_an_instance_that_comes_back_honours_what_was_dropped_meanwhile(make_pool, open_store, blocks):
    pool = make_pool(blocks=2)
    b = open_store(pool, "b")
    keys, data = blocks(2)
    open_store(pool, "a").put(keys, data)
    b.drop(keys[:1])
    a = open_store(pool, "a")
    a.put(*blocks(1))
    assert b.find(keys[1:]) == 1
    assert pool.stats().released_blocks == 1
