"""Which parts of vLLM's KV its ranks have, in which dtype, and in which order."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import vllm
from seer_worker.process.kv_parts import KvParts
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.platforms import current_platform

from seer_core.errors import EngineError
from seer_vllm.routing import experts_move

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec

__all__ = ["check_kv_dtype", "kv_order", "parts_of"]

READ_PLAIN = ("turboquant", "ultraquant")
"""Formats in which a prefill reads the keys and values of its own tokens before they are rounded."""


def check_kv_dtype(config: VllmConfig) -> None:
    """Refuse KV of a dtype with which tokens depend on chunks, or may.

    Raises:
        EngineError: it is such a dtype.
    """
    dtype = config.cache_config.cache_dtype
    if dtype == "auto":
        return
    remedy = "take kv_cache_dtype out of [engine.vllm].engine_args"
    if dtype.startswith(READ_PLAIN):
        raise EngineError(
            f"with kv_cache_dtype = {dtype!r} tokens depend on where chunks end, because vLLM rounds the"
            f" KV of earlier chunks and not of the one it prefills: {remedy}, or take fp8"
        )
    if current_platform.is_cpu():
        raise EngineError(
            f"kv_cache_dtype = {dtype!r} has no proof of equal tokens on a CPU, where vLLM takes it only with"
            f" AVX-512 or AMX: {remedy}"
        )


def parts_of(config: VllmConfig, specs: Sequence[KVCacheSpec]) -> KvParts:
    """Return the parts of KV of these kinds.

    A model of fewer heads than ranks has each head on several of them, and latent KV (MLA) is on all; of a
    recurrent state each rank has a part of its own.
    """
    ranks = config.parallel_config.tensor_parallel_size
    heads = 1 if config.model_config.use_mla else config.model_config.get_total_num_kv_heads()
    single = all(getattr(spec, "num_kv_heads", 0) == 1 for spec in specs)
    repeated = single and ranks % heads == 0
    return KvParts("vllm", ranks, heads if repeated else ranks, _dtype(config, specs))


def kv_order(config: VllmConfig) -> str:
    """Return a name of the order in which a worker's kernels keep the numbers within a block, once it has KV.

    vLLM chooses kernels by the machine: with AMX a CPU packs keys in another order than without, and GPUs of
    different kinds may have different backends, all with blocks of one size.
    """
    found = {vllm.__version__}
    for layer in config.compilation_config.static_forward_context.values():
        if isinstance(layer, AttentionLayerBase):
            kept = getattr(layer, "kv_cache", ())
            parts = kept if isinstance(kept, list | tuple) else [kept]
            dims = [sorted(range(each.ndim), key=each.stride, reverse=True) for each in parts]
            found.add(f"{layer.get_attn_backend().get_name()} {getattr(layer, 'isa', '')} {dims}")
    return hashlib.sha256("\n".join(sorted(found)).encode()).hexdigest()[:8]


def _dtype(config: VllmConfig, specs: Sequence[KVCacheSpec]) -> str:
    """Return the dtypes of KV, and whether blocks have experts beside it.

    To vLLM's specs all formats of eight bits are the same bytes.
    """
    cache = config.cache_config
    kinds = [each for spec in specs for each in getattr(spec, "kv_cache_specs", {"": spec}).values()]
    dtypes = {dtype for each in kinds for dtype in getattr(each, "dtypes", None) or [each.dtype]}
    names = sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)
    if cache.cache_dtype != "auto":
        names = [cache.cache_dtype, *names, *cache.kv_cache_dtype_skip_layers]
    if experts_move(config):
        names.append("experts")
    return "-".join(names)
