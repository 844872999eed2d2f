"""Steps of vLLM's attention on a CPU; the import of this module imports vLLM, which takes seconds."""

from __future__ import annotations

from itertools import accumulate

import torch
from seer_vllm.cpu_attention import LONGEST, one_position_each
from vllm import _custom_ops as ops
from vllm.platforms import current_platform
from vllm.v1.attention.backend import CommonAttentionMetadata

__all__ = ["BLOCK_TOKENS", "HEADS", "HEAD_DIM", "KV_HEADS", "LONGEST", "attend", "one_position_each", "step"]

HEADS, KV_HEADS, HEAD_DIM, BLOCK_TOKENS = 6, 2, 32, 32

current_platform.import_kernels()


def step(lengths: list[int], seen: list[int]) -> CommonAttentionMetadata:
    """Return a step that computes the last ``lengths`` of ``seen`` positions of each request."""
    start = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    blocks = -(-max(seen) // BLOCK_TOKENS)
    table = 1 + torch.arange(len(lengths) * blocks, dtype=torch.int32).view(len(lengths), blocks)
    return CommonAttentionMetadata(
        query_start_loc=start,
        query_start_loc_cpu=start,
        seq_lens=torch.tensor(seen, dtype=torch.int32),
        num_reqs=len(lengths),
        num_actual_tokens=sum(lengths),
        max_query_len=max(lengths),
        max_seq_len=max(seen),
        block_table_tensor=table,
        slot_mapping=torch.zeros(sum(lengths), dtype=torch.int64),
    )


def attend(metadata: CommonAttentionMetadata, query: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    """Return what the queries of a step get."""
    keys, values = cache.chunk(2, dim=2)
    output = torch.empty_like(query)
    plan = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=metadata.num_reqs,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        seq_lens=metadata.seq_lens,
        dtype=torch.float32,
        query_start_loc=metadata.query_start_loc,
        causal=True,
        sliding_window_size=-1,
        isa="vec",
        enable_kv_split=True,
        dynamic_causal=None,
        kv_cache_dtype="auto",
    )
    ops.cpu_attention_with_kv_cache(
        query=query,
        key_cache=keys,
        value_cache=values,
        output=output,
        query_start_loc=metadata.query_start_loc,
        seq_lens=metadata.seq_lens,
        scale=HEAD_DIM**-0.5,
        causal=True,
        alibi_slopes=None,
        sliding_window=-1,
        block_table=metadata.block_table_tensor,
        softcap=0,
        scheduler_metadata=plan,
        s_aux=None,
        dynamic_causal=None,
        k_scale=1.0,
        v_scale=1.0,
        kv_cache_dtype="auto",
    )
    return output
