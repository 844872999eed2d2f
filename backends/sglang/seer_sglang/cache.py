"""SGLang's prefix cache with a pool of KV behind it.

SGLang's interface has caches with more than lies in its KV memory: a match may promise it, and loads it once
the request has been admitted, with room reserved.  What comes out of the pool then becomes a part of the
cache, as if it had been computed here.  A request that waits until its KV has come out of the pool is passed
over when a step is planned.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder
from sglang.srt.mem_cache.base_prefix_cache import (
    InitLoadBackParams,
    InsertParams,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.common import evict_from_tree_cache
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.registry import (
    create_unified_radix_cache,
    get_radix_cache_factory,
    register_radix_cache_backend,
)
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from seer_sglang.pooling import KvPoolAdapter

__all__ = ["BACKEND", "PooledCache", "PooledPrefillAdder", "register"]

BACKEND = "seer"
"""The name under which this cache is registered in SGLang."""


class PooledCache(UnifiedRadixCache):
    """A prefix cache that also has what a pool has."""

    pooling: KvPoolAdapter | None = None

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """Return what is here of a text, and for a request what the pool has behind that."""
        result = super().match_prefix(params)
        if self.pooling is None or params.req is None:
            return result
        key, cached = params.key, result.device_prefix_len
        found = self.pooling.stage(params.req.rid, key.token_ids, cached, len(key))
        return result._replace(host_hit_length=found) if found else result

    def init_load_back(self, params: InitLoadBackParams) -> tuple[int, Any]:
        """Load what was promised; return how many tokens, and where in the tree their last one is.

        All of it or nothing: without room the request computes it.
        """
        req, count = params.req, params.host_hit_length
        assert self.pooling is not None
        evict_from_tree_cache(self, count)
        slots = self.token_to_kv_pool_allocator.alloc(count)
        if slots is None:
            return 0, req.last_node
        self.pooling.load(req.rid, slots)
        text = req.full_untruncated_fill_ids[: req.prefix_len + count]
        inserted = self.insert(
            InsertParams(
                key=RadixKey(text, req.extra_key, cache_salt=req.cache_salt),
                value=torch.cat([self.prefix_device_indices(req), slots]),
                prev_prefix_len=req.prefix_len,
            )
        )
        return count, inserted.last_device_node

    def claim_kv_row(self, req: Req) -> bool:
        """Let the pool have the KV of a request that is about to leave it."""
        if self.pooling is not None:
            slots = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx, : req.owned_kv_len()]
            text = req.origin_input_ids + req.output_ids_through_stop
            if req.finished():
                cut = isinstance(req.finished_reason, FINISH_LENGTH)
                self.pooling.end(req.rid, text, slots, cut=cut)
            else:
                self.pooling.save(req.rid, text, slots)
        claimed: bool = super().claim_kv_row(req)
        return claimed


class PooledPrefillAdder(PrefillAdder):
    """Chooses the requests of a prefill among those that do not wait for their KV."""

    def add_one_req(self, req: Req, has_chunked_req: bool, truncation_align_size: int | None) -> AddReqResult:
        """Let a request in, if it fits; one that waits stays in its place in the queue."""
        cache = self.tree_cache
        if isinstance(cache, PooledCache) and cache.pooling is not None and cache.pooling.waits(req.rid):
            return AddReqResult.CONTINUE
        return super().add_one_req(req, has_chunked_req, truncation_align_size)


def register() -> None:
    """Let SGLang make this cache where its arguments name it."""
    if get_radix_cache_factory(BACKEND) is None:
        register_radix_cache_backend(
            BACKEND, lambda context: create_unified_radix_cache(context, cache_class=PooledCache)
        )
