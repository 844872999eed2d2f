"""Blocks into a store and out of it, their keys, and their use in SGLang's cache."""

import asyncio
import json
import subprocess
from array import array
from concurrent.futures import wait
from pathlib import Path

import msgspec
import numpy as np
import pytest
from msgspec import structs
from seer_sglang.doctor import interpreter
from seer_worker.process.kv_parts import KvParts
from seer_worker.process.stores import FailsafeStore

from seer_core.errors import EngineError
from seer_core.model import Sampling
from seer_core.ports.engine import ChunkJob

torch = pytest.importorskip("torch")

SLOTS, BLOCK = 200, 16
WALK = Path(__file__).with_name("sglang_cache_walk.py")
JOB = ChunkJob("job", "g/0", "g", list(range(40)), 20, 60, Sampling(), 0, 0)


class Store:
    """Keeps everything, and a list of the calls."""

    def __init__(self):
        self.blocks, self.calls, self.short = {}, [], 0

    def find(self, keys):
        self.calls.append(("find", len(keys)))
        return next((i for i, key in enumerate(keys) if key not in self.blocks), len(keys))

    def lacks(self, keys):
        return [i for i, key in enumerate(keys) if key not in self.blocks]

    def put(self, keys, blocks):
        self.calls.append(("put", len(keys)))
        self.blocks |= zip(keys, blocks.copy(), strict=True)

    def get(self, keys, blocks):
        for i, key in enumerate(keys):
            blocks[i] = self.blocks[key]
        return len(keys) - self.short

    def drop(self, keys):
        self.calls.append(("drop", len(keys)))

    def close(self):
        pass


def kv(seed, dtype=torch.float32):
    """Return the KV of two layers, one of them twice as large."""
    torch.manual_seed(seed)
    return [torch.randn(SLOTS, 2, size).to(dtype) for size in (4, 8)]


def pooling(store, layers, page=1, sound=lambda: True, awaited_bytes=None):
    from seer_sglang.blocks import SglangLayers
    from seer_sglang.pooling import KvPoolAdapter
    from seer_sglang.ranked_pool import LeadingPool
    from seer_sglang.ranks import LeadingRank

    blocks = SglangLayers(layers, page)
    failsafe, parts = FailsafeStore(store), KvParts("sglang")
    pool = LeadingPool(failsafe, blocks.block_bytes, LeadingRank(), parts, awaited_bytes)
    return KvPoolAdapter(blocks, pool, sound)


def text(length):
    return array("q", range(length))


def slots(length, seed=0):
    return torch.randperm(SLOTS, generator=torch.Generator().manual_seed(seed))[:length]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("page", "block"), [(1, 16), (6, 18), (32, 32)])
def test_a_block_is_whole_pages_and_comes_back_without_what_is_cached(dtype, page, block):
    from seer_sglang.blocks import SglangLayers

    here, there = kv(1, dtype), kv(2, dtype)
    assert (SglangLayers(here, page).block_tokens, SglangLayers(here, page).block_bytes) == (
        block,
        block * 2 * 12 * dtype.itemsize,
    )
    source, target = slots(3 * block), slots(3 * block - 5, seed=1)
    read = SglangLayers(here, page).read(source)
    assert (read.shape, read.dtype) == ((3, block * 2 * 12 * dtype.itemsize), np.uint8)
    before = [layer.clone() for layer in there]
    SglangLayers(there, page).write(target, read)
    for mine, theirs, was in zip(here, there, before, strict=True):
        assert torch.equal(theirs[target], mine[source[5:]])
        others = torch.ones(SLOTS, dtype=torch.bool).index_fill(0, target, value=False)
        assert torch.equal(theirs[others], was[others])


def test_kv_that_is_kept_otherwise_is_refused():
    from seer_sglang.blocks import SglangLayers

    with pytest.raises(EngineError, match=r"otherwise than token by token .*; set \[seer\].kv_pool = \"none"):
        SglangLayers([], 1)


def test_a_cut_chunk_is_saved_as_far_as_the_store_lacks_it_and_found_elsewhere():
    store, mine, theirs = Store(), kv(1), kv(2)
    a, b = pooling(store, mine), pooling(store, theirs)
    a.open("0", JOB, "weights")
    saved = slots(99)
    a.end("0", text(100), saved[:70], cut=True)
    a.end("0", text(100), saved, cut=True)
    assert store.calls == [("put", 4), ("put", 2)]
    b.open("1", JOB, "weights")
    assert b.stage("1", text(200), cached=20, limit=100) == 6 * BLOCK - 20
    taken = slots(6 * BLOCK - 20, seed=3)
    b.load("1", taken)
    for from_a, in_b in zip(mine, theirs, strict=True):
        assert torch.equal(in_b[taken], from_a[saved[20 : 6 * BLOCK]])


def test_what_is_promised_has_been_copied_and_is_asked_for_once():
    store = Store()
    a = pooling(store, kv(1))
    a.open("0", JOB, "weights")
    a.end("0", text(100), slots(100), cut=True)
    store.calls.clear()
    store.short = 2
    assert [a.stage("0", text(100), cached, limit=99) for cached in (20, 20, 25, 63, 64)] == [
        4 * BLOCK - 20,
        4 * BLOCK - 20,
        4 * BLOCK - 25,
        1,
        0,
    ]
    assert store.calls == [("find", 5)]
    a.stage("0", text(100), 0, limit=99)
    assert store.calls == [("find", 5), ("find", 6)]  # anew where an earlier block is the first


def test_a_request_with_much_to_load_waits_until_it_is_there_and_one_with_little_does_not():
    store, mine, theirs = Store(), kv(1), kv(2)
    a = pooling(store, mine)
    b = pooling(store, theirs, awaited_bytes=2 * a._layers.block_bytes)
    a.open("0", JOB, "weights")
    saved = slots(99)
    a.end("0", text(100), saved, cut=True)
    for rid in ("few", "many", "aborted"):
        b.open(rid, JOB, "weights")
    assert b.stage("few", text(200), cached=0, limit=40) == 2 * BLOCK
    assert b.stage("many", text(200), cached=0, limit=100) == 0
    assert b.stage("aborted", text(200), cached=0, limit=100) == 0
    assert [b.waits(rid) for rid in ("few", "many", "aborted", "another")] == [False, True, True, False]
    b.close("aborted")
    wait([coming for _, coming in b.pool._coming.values()])
    assert b.waiting
    assert b.stage("many", text(200), cached=20, limit=100) == 6 * BLOCK - 20
    assert not b.waiting
    taken = slots(6 * BLOCK - 20, seed=3)
    b.load("many", taken)
    for from_a, in_b in zip(mine, theirs, strict=True):
        assert torch.equal(in_b[taken], from_a[saved[20 : 6 * BLOCK]])


def test_what_is_not_loaded_when_a_request_is_let_in_is_given_up():
    store = Store()
    a = pooling(store, kv(1))
    a.open("0", JOB, "weights")
    a.end("0", text(100), slots(100), cut=True)
    assert a.stage("0", text(100), 0, limit=99) == 6 * BLOCK
    a.let_in("0", 0)
    store.blocks.clear()
    assert a.stage("0", text(100), 0, limit=99) == 0


@pytest.mark.parametrize(
    ("most", "awaited", "expected"),
    [
        (2, 9, [0, 0, 2, 2, 0, 1]),
        (6, 9, [0, 0, 4, 0, 0, 0]),
        (9, 0, [0, 0, 4, 0, 0, 1]),
        (9, 10, [0, 0, 4, 0, 0, 0]),
        (10, 11, [0, 0, 0, 0, 0, 5]),
        (12, 12, [0] * 6),
    ],
)
def test_full_blocks_of_a_running_chunk_are_saved_many_in_a_step_and_the_rest_at_its_end(
    most, awaited, expected
):
    store, layers = Store(), kv(1)
    a = pooling(store, layers)
    a._layers.most_staged = most
    a._layers.stage_from_half_of(awaited)
    saved = slots(160)
    for rid in ("0", "last", "measured"):
        a.open(rid, structs.replace(JOB, last=rid == "last"), "weights", saves=rid != "measured")
        a.let_in(rid, 20)
    put = []
    for tokens in (15, 31, 90, 90, 90, 96):
        computed = dict.fromkeys(("0", "last", "measured"), tokens)
        before = len(store.blocks)
        a.stage_running(computed, lambda rid, count: (text(100), saved[:count]))
        assert len(store.blocks) == before
        a.put_staged()
        put.append(len(store.blocks) - before)
    assert put == expected  # its first block was found
    a.end("0", text(100), saved[:99], cut=True)
    assert len(store.blocks) == 6
    b = pooling(store, kv(2))
    b.open("1", JOB, "weights")
    taken = slots(6 * BLOCK, seed=3)
    assert b.stage("1", text(200), cached=0, limit=100) == 6 * BLOCK
    b.load("1", taken)
    for from_a, in_b in zip(layers, b._layers._layers, strict=True):
        assert torch.equal(in_b[taken], from_a[saved[: 6 * BLOCK]])


@pytest.mark.parametrize("other", ["weights", "tokens", "an earlier token", "layout", "block", "dtype"])
def test_kv_of_other_origin_is_not_found(other):
    store = Store()
    a = pooling(store, kv(1))
    a.open("0", JOB, "weights")
    a.end("0", text(64), slots(64), cut=True)
    layers, page = kv(2), 1
    tokens = text(64)
    if other == "layout":
        layers = layers[::-1]
    elif other == "block":
        page = 32
    elif other == "dtype":
        layers = kv(2, torch.bfloat16)
    elif other == "tokens":
        tokens = array("q", [*range(63), 99])
    elif other == "an earlier token":
        tokens = array("q", [99, *range(1, 64)])
    b = pooling(store, layers, page)
    b.open("0", JOB, "other weights" if other == "weights" else "weights")
    assert b.stage("0", tokens, cached=0, limit=64) == (48 if other == "tokens" else 0)


def test_a_response_that_is_over_is_dropped_and_its_prompt_with_its_group():
    for job, cut in ((JOB, False), (structs.replace(JOB, last=True), True)):
        store = Store()
        a = pooling(store, kv(1))
        a.open("0", job, "weights")
        a.end("0", text(100), slots(100), cut=cut)
        a.pool.forget_group("g")
        a.pool.forget_group("g")
        assert store.calls == [("drop", 5), ("drop", 1)]


def test_a_chunk_that_is_given_up_is_dropped_and_no_longer_saved():
    store = Store()
    a = pooling(store, kv(1))
    a.open("0", JOB, "weights")
    a.give_up("0", text(40))
    a.close("0")
    a.end("0", text(100), slots(100), cut=True)
    assert a.stage("0", text(100), 0, 99) == 0
    assert store.calls == [("drop", 1)]


def test_nothing_stays_of_a_request_that_was_put_back_and_then_given_up():
    store = Store()
    a = pooling(store, kv(1))
    a.open("0", JOB, "weights")
    a.save("0", text(90), slots(89))
    a.give_up("0", text(40))
    a.close("0")
    a.pool.forget_group("g")
    assert store.calls == [("put", 5), ("drop", 4), ("drop", 1)]


def test_a_request_that_is_put_back_is_saved_even_in_its_last_chunk_but_not_what_is_not_finite():
    store, sound = Store(), [False, True]
    a = pooling(store, kv(1), sound=lambda: sound.pop(0))
    a.open("0", structs.replace(JOB, last=True), "weights")
    a.save("0", text(50), slots(50))
    assert store.calls == []
    a.save("0", text(50), slots(50))
    assert store.calls == [("put", 3)]


def test_a_measurement_saves_nothing():
    store = Store()
    a = pooling(store, kv(1))
    a.open("0", JOB, "measure", saves=False)
    a.end("0", text(100), slots(100), cut=True)
    assert store.calls == []


@pytest.mark.engine  # imports SGLang: ten seconds
@pytest.mark.parametrize("kind", ["forgetful", "local", "mooncake"])
def test_no_request_reads_kv_of_another_text_and_none_is_lost_however_little_memory_there_is(models, kind):
    pool, arguments = None, []
    if kind == "local":
        pool = pytest.importorskip("seer_kv_local", reason="backends/kv_local is not installed").LocalPool(
            1 << 20
        )
    elif kind == "mooncake":
        mooncake = pytest.importorskip("seer_mooncake", reason="backends/mooncake is not installed")
        settings = {
            "capacity_bytes": 64 << 20,
            "buffer_bytes": 1 << 20,
            "start_timeout_s": 60.0,
            "timeout_s": 60.0,
        }
        pool = mooncake.MooncakePool(msgspec.convert(settings, mooncake.Settings))
    try:
        if pool is not None:
            asyncio.run(pool.start(["a", "b"]))
            stores = {name: pool.store(name) for name in "ab"}
            settings = {name: dict(store.settings) for name, store in stores.items()}
            arguments = [stores["a"].path, json.dumps(settings)]
        command = [interpreter(), str(WALK), str(models[0]), *arguments]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=240)
    finally:
        if pool is not None:
            asyncio.run(pool.stop())
    assert ran.returncode == 0, ran.stderr
    for line in ran.stdout.splitlines()[-2:]:
        _page, loaded, refused, waited = map(int, line.split())
        assert loaded > waited > 0
        assert refused > 0 or kind != "forgetful"


KINDS = """
import json
from types import SimpleNamespace

import torch
from seer_sglang.engine import _parts_of
from sglang.srt.configs.model_config import AttentionArch

def kind(name, dtype, ranks=1):
    model = SimpleNamespace(attention_arch=AttentionArch.MHA, get_total_num_kv_heads=lambda: 2)
    runner = SimpleNamespace(model_config=model, kv_cache_dtype_str=name, kv_cache_dtype=dtype)
    return _parts_of(runner, ranks).kind

print(json.dumps([
    kind("auto", torch.bfloat16),
    kind("auto", torch.float32, 2),
    kind("fp8_e4m3", torch.float8_e4m3fn),
    kind("fp8_e5m2", torch.float8_e5m2),
    kind("mxfp8", torch.float8_e4m3fn),
]))
"""


def test_formats_of_eight_bits_that_are_alike_in_size_are_kinds_of_their_own(make_fleet, models, run_in_fork):
    [*_, last] = run_in_fork(make_fleet(models[0]).engines[0], KINDS)
    assert json.loads(last) == [
        "sglang-bfloat16",
        "sglang-tp2-float32",
        "sglang-fp8_e4m3",
        "sglang-fp8_e5m2",
        "sglang-mxfp8",
    ]
