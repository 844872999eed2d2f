"""A walk over two of SGLang's caches with too little KV memory and one pool, run under SGLang's interpreter.

Arguments: a model and, for stores of a real pool, their import path and settings, by name, as JSON.

Each slot holds a number that stands for its token and all before it, where a model would have written KV.
The second cache's requests wait for all that they load.
"""

import json
import random
import sys
from array import array
from concurrent.futures import wait
from functools import partial
from zlib import crc32

import torch
from seer_sglang import internals
from seer_worker.process.kv_parts import KvParts
from seer_worker.process.stores import STORE, FailsafeStore

internals.check_kernels()

from seer_sglang.blocks import SglangLayers  # noqa: E402
from seer_sglang.cache import PooledCache, PooledPrefillAdder  # noqa: E402
from seer_sglang.engine import server_args  # noqa: E402
from seer_sglang.pooling import KvPoolAdapter  # noqa: E402
from seer_sglang.ranked_pool import LeadingPool  # noqa: E402
from seer_sglang.ranks import LeadingRank  # noqa: E402
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, FINISH_MATCHED_TOKEN, Req  # noqa: E402
from sglang.srt.managers.schedule_policy import AddReqResult  # noqa: E402
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # noqa: E402
from sglang.srt.mem_cache.common import evict_from_tree_cache, release_kv_cache  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool  # noqa: E402
from sglang.srt.mem_cache.unified_cache.components import ComponentType  # noqa: E402
from sglang.srt.runtime_context import SpawnRanks, publish  # noqa: E402
from sglang.srt.sampling.sampling_params import SamplingParams  # noqa: E402

from seer_core.model import Sampling  # noqa: E402
from seer_core.ports.engine import ChunkJob  # noqa: E402
from seer_core.ports.kv import StoreContext  # noqa: E402

SLOTS, STEPS = 320, 400
SETTINGS = {"device": "cpu", "attention_backend": "torch_native", "disable_cuda_graph": True}


class Store:
    """Keeps what there is room for, and forgets at random."""

    def __init__(self, dice):
        self.blocks, self.dice = {}, dice

    def find(self, keys):
        return next((i for i, key in enumerate(keys) if key not in self.blocks), len(keys))

    def lacks(self, keys):
        return [i for i, key in enumerate(keys) if key not in self.blocks]

    def put(self, keys, blocks):
        self.blocks |= zip(keys, blocks.copy(), strict=True)

    def get(self, keys, blocks):
        count = len(keys) if self.dice.random() < 0.8 else self.dice.randrange(len(keys) + 1)
        for i, key in enumerate(keys[:count]):
            blocks[i] = self.blocks[key]
        return count

    def drop(self, keys):
        for key in keys:
            self.blocks.pop(key, None)

    def close(self):
        pass


class Side:
    """One cache, its memory, and the requests that run on it."""

    def __init__(self, make_store, page, awaited_bytes):
        self.page = page
        self.kv = MHATokenToKVPool(SLOTS, page, torch.float32, 1, 2, 2, "cpu", False)
        if page == 1:
            self.allocator = TokenToKVPoolAllocator(SLOTS, torch.float32, "cpu", self.kv, False)
        else:
            self.allocator = PagedTokenToKVPoolAllocator(SLOTS, page, torch.float32, "cpu", self.kv, False)
        self.rows = ReqToTokenPool(8, SLOTS, "cpu", False)
        params = CacheInitParams(
            False, self.rows, self.allocator, page, tree_components=(ComponentType.FULL,)
        )
        self.cache = PooledCache(params)
        layers = SglangLayers([*self.kv.k_buffer, *self.kv.v_buffer], page)
        self.store = make_store(layers)
        store, parts = FailsafeStore(self.store, complain), KvParts("sglang")
        pool = LeadingPool(store, layers.block_bytes, LeadingRank(), parts, awaited_bytes)
        self.pooling = KvPoolAdapter(layers, pool, lambda: True)
        self.cache.pooling = self.pooling
        self.running, self.waiting = [], []

    def ask(self, rid, text, more):
        """Return a new request."""
        params = SamplingParams(max_new_tokens=more)
        params.normalize(None)
        req = Req(rid, None, array("q", text), params, vocab_size=99, cache_salt="salt")
        job = ChunkJob(rid, rid, "group", list(text), min(20, len(text)), more, Sampling(), 0, 0)
        self.pooling.open(rid, job, "salt")
        return req

    def admit(self, req):
        """Let a request in, if SGLang does, and write its KV.

        Returns what was loaded for it, None if it is not let in; a request that has to wait is kept.
        """
        text = req.origin_input_ids
        req.init_next_round_input(self.cache)
        adder = PooledPrefillAdder(self.page, self.cache, self.allocator, None, 1.0, 4096, None)
        promised = req.host_hit_length
        result = adder.add_one_req(req, False, None)
        if self.pooling.waits(req.rid):
            assert (promised, adder.can_run_list, result) == (0, [], AddReqResult.CONTINUE)
            wait([coming for _, coming in self.pooling.pool._coming.values()])  # or dice would differ
            self.waiting.append(req)
            return 0
        if not adder.can_run_list:
            self.pooling.close(req.rid)
            return None
        self.pooling.let_in(req.rid, req.prefix_len)
        assert req.host_loaded_length in (0, promised)
        room = -(-(len(text) - req.prefix_len) // self.page) * self.page
        evict_from_tree_cache(self.cache, room)
        prefix = self.cache.prefix_device_indices(req)
        self.rows.alloc([req])
        slots = self.allocator.alloc(room)
        assert slots is not None, "SGLang let a request in for which there is no room"
        row = torch.cat([prefix, slots])
        self.rows.write((req.kv.req_pool_idx, slice(0, len(row))), row.to(torch.int32))
        numbers = stand_for(text)
        self.check(row[: req.prefix_len], numbers)
        for layer in (*self.kv.k_buffer, *self.kv.v_buffer):
            layer[row[req.prefix_len : len(text)]] = numbers[req.prefix_len :, None, None].expand(-1, 1, 2)
        req.kv.kv_committed_len = len(text)
        req.kv.kv_allocated_len = len(text)
        self.running.append(req)
        return req.host_loaded_length

    def leave(self, req, how):
        """End a request, or put it back."""
        row = self.rows.req_to_token[req.kv.req_pool_idx, : req.kv.kv_committed_len].long()
        self.check(row, stand_for(req.origin_input_ids))
        req.output_ids = array("q", [7])  # its KV is not there yet
        if how == "cut":
            req.finished_reason = FINISH_LENGTH(1)
        elif how == "stopped":
            req.finished_reason = FINISH_MATCHED_TOKEN(7)
        req.finished_len = 1
        release_kv_cache(req, self.cache, checkpoint=how != "put back")
        self.pooling.close(req.rid)
        self.running.remove(req)

    def check(self, slots, numbers):
        for layer in (*self.kv.k_buffer, *self.kv.v_buffer):
            assert torch.equal(layer[slots][:, 0, 1], numbers[: len(slots)]), "KV of another text"


def stand_for(text):
    """Return a number for each token that all before it are in, float32 [tokens]."""
    numbers, last = [], 0
    for token in text:
        last = crc32(token.to_bytes(4, "little"), last)
        numbers.append(last >> 8)  # as exact as float32
    return torch.tensor(numbers, dtype=torch.float32)


def complain(reason):
    raise AssertionError(reason)


def walk(page, seed, spec=None):
    """Return how many tokens were loaded, how many requests were not let in, and the tokens waited for."""
    dice = random.Random(seed)
    store = Store(dice)

    def make_store(name, layers):
        if spec is None:
            return store
        path, settings = spec
        return STORE.make(path, settings[name], StoreContext(name, layers.block_bytes, layers.block_tokens))

    sides = [Side(partial(make_store, name), page, awaited) for name, awaited in (("a", None), ("b", 0))]
    texts = [[dice.randrange(90) for _ in range(20)] for _ in range(3)]
    loaded = refused = waited = 0
    for number in range(STEPS):
        side = dice.choice(sides)
        if side.running and dice.random() < 0.5:
            side.leave(dice.choice(side.running), dice.choice(["cut", "cut", "stopped", "put back"]))
        elif side.waiting and dice.random() < 0.5:
            req = side.waiting.pop(dice.randrange(len(side.waiting)))
            if dice.random() < 0.1:
                side.pooling.give_up(req.rid, req.origin_input_ids)
                side.pooling.close(req.rid)
                continue
            took = side.admit(req)
            loaded += took or 0
            waited += took or 0
            refused += took is None
        elif len(side.running) < 6:
            text = dice.choice(texts[-12:])
            text = [
                *text[: dice.randrange(10, len(text) + 1)],
                *dice.choices(range(90), k=dice.randrange(1, 60)),
            ]
            texts.append(text[:150])
            took = side.admit(side.ask(str(number), texts[-1], dice.randrange(1, 30)))
            loaded += took or 0
            refused += took is None
    for side in sides:
        for req in [*side.running]:
            side.leave(req, "put back")
        free = side.allocator.available_size() + side.cache.evictable_size()
        assert (free, side.cache.protected_size()) == (SLOTS, 0), "KV memory that no request can free"
        side.store.close()
    return loaded, refused, waited


publish(
    server_args({"model_path": sys.argv[1], **SETTINGS}, None),
    role="scheduler",
    ranks=SpawnRanks(world_rank=0, gpu_id=0),
)
spec = (sys.argv[2], json.loads(sys.argv[3])) if len(sys.argv) > 2 else None
for page in (1, 16):
    found = [walk(page, seed, spec) for seed in range(3 if spec is None else 1)]
    print(page, *map(min, zip(*found, strict=True)))
