"""Which parts of vLLM's KV its ranks have."""

from __future__ import annotations

from typing import TYPE_CHECKING

from seer_worker.process.kv_parts import KvParts

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec

__all__ = ["parts_of"]


def parts_of(config: VllmConfig, spec: KVCacheSpec) -> KvParts:
    """Return the parts of KV of this kind.

    A model of fewer heads than ranks has each head on several of them, and latent KV (MLA) is on all.
    """
    ranks = config.parallel_config.tensor_parallel_size
    heads = 1 if config.model_config.use_mla else config.model_config.get_total_num_kv_heads()
    repeated = getattr(spec, "num_kv_heads", 0) == 1 and ranks % heads == 0
    return KvParts("vllm", ranks, heads if repeated else ranks)
