"""Short drafts shown to vLLM's CPU attention as requests of one position: the same numbers come out."""

from __future__ import annotations

import warnings
from itertools import accumulate

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's own imports
    from seer_vllm.cpu_attention import LONGEST, one_position_each
    from vllm import _custom_ops as ops
    from vllm.platforms import current_platform
    from vllm.v1.attention.backend import CommonAttentionMetadata

HEADS, KV_HEADS, HEAD_DIM, BLOCK_TOKENS = 6, 2, 32, 32

pytestmark = [
    pytest.mark.engine,  # imports vLLM: ten seconds
    pytest.mark.skipif(not current_platform.is_cpu(), reason="vLLM is not built for CPU here"),
]
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


@pytest.mark.parametrize(
    ("lengths", "seen"),
    [
        ([1, 2, 1, 4, 3], [40, 2, 100, 70, 33]),
        ([2], [65]),
        ([LONGEST, 9, 1, 30, 2], [64, 40, 1, 30, 300]),
    ],
)
def test_attention_gives_the_same(lengths: list[int], seen: list[int]) -> None:
    torch.manual_seed(0)
    whole = step(lengths, seen)
    split = one_position_each(whole)
    assert split.num_reqs == sum(length if length <= LONGEST else 1 for length in lengths)
    assert split.max_query_len == max([length for length in lengths if length > LONGEST], default=1)
    assert split.query_start_loc[-1] == whole.num_actual_tokens
    query = torch.randn(sum(lengths), HEADS, HEAD_DIM)
    blocks = int(whole.block_table_tensor.max()) + 1
    cache = torch.randn(blocks, KV_HEADS, 2 * BLOCK_TOKENS, HEAD_DIM)
    torch.testing.assert_close(attend(split, query, cache), attend(whole, query, cache), rtol=1e-5, atol=1e-5)


def test_a_step_without_drafts_is_left_alone() -> None:
    plain = step([1, 1, 20], [5, 6, 20])
    assert one_position_each(plain) is plain
