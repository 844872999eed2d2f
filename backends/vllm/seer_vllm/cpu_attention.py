"""Verifying short drafts on CPU at the price of plain decoding.

vLLM's CPU attention has a fast path for requests that compute one position.  A request with even one draft
token leaves it, and costs about three times as much, in proportion to its context.  The positions of a short
draft are therefore shown to the kernel as requests of one position each, that share their blocks and of which
each sees one token more than the one before it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata, CPUAttentionMetadataBuilder

__all__ = ["install", "one_position_each"]

LONGEST = 4
"""Positions of a request up to which splitting was faster (fitted: float32, AVX2, contexts of 64 to 1000)."""


_build = CPUAttentionMetadataBuilder.build


def install() -> None:
    """Split the short requests of every step from now on."""
    CPUAttentionMetadataBuilder.build = _split_and_build  # type: ignore[method-assign]


def _split_and_build(
    self: CPUAttentionMetadataBuilder,
    common_prefix_len: int,
    common_attn_metadata: CommonAttentionMetadata,
    fast_build: bool = False,
) -> CPUAttentionMetadata:
    metadata = common_attn_metadata
    if metadata.causal is True and metadata.max_query_len > 1:
        metadata = one_position_each(metadata)
    return _build(self, common_prefix_len, metadata, fast_build)


def one_position_each(metadata: CommonAttentionMetadata) -> CommonAttentionMetadata:
    """Return the same step with its requests of 2 to ``LONGEST`` positions split into one each."""
    requests = metadata.num_reqs
    # numpy: on arrays of this size an operation of torch takes four times as long.
    lengths = np.diff(metadata.query_start_loc[: requests + 1].numpy())
    short = (lengths > 1) & (lengths <= LONGEST)
    if not short.any():
        return metadata
    rows = np.where(short, lengths, 1)
    source = np.repeat(np.arange(requests), rows)
    after = np.cumsum(rows)[source] - np.arange(len(source)) - 1
    lengths = np.where(short, 1, lengths)[source]
    start = np.zeros(len(source) + 1, dtype=np.int32)
    np.cumsum(lengths, out=start[1:])
    seen = metadata.seq_lens[:requests].numpy()[source] - after
    return replace(
        metadata,
        num_reqs=len(source),
        query_start_loc=torch.from_numpy(start),
        seq_lens=torch.from_numpy(seen.astype(np.int32, copy=False)),
        block_table_tensor=metadata.block_table_tensor[torch.from_numpy(source)],
        max_query_len=int(lengths.max()),
    )
