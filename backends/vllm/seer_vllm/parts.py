"""Which parts of vLLM's KV its ranks have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from seer_worker.process.kv_parts import KvParts

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec

__all__ = ["parts_of"]


def parts_of(config: VllmConfig, specs: Sequence[KVCacheSpec]) -> KvParts:
    """Return the parts of KV of these kinds.

    A model of fewer heads than ranks has each head on several of them, and latent KV (MLA) is on all; of a
    recurrent state each rank has a part of its own.
    """
    ranks = config.parallel_config.tensor_parallel_size
    heads = 1 if config.model_config.use_mla else config.model_config.get_total_num_kv_heads()
    single = all(getattr(spec, "num_kv_heads", 0) == 1 for spec in specs)
    repeated = single and ranks % heads == 0
    return KvParts("vllm", ranks, heads if repeated else ranks)
