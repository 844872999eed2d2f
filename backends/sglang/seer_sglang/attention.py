"""Attention of prefills and trees on a CPU.

SGLang's ``torch_native`` has no trees.  Of a prompt whose beginning is cached it computes the queries of
that beginning as well, and throws them away: a chunk that goes on after 3,000 tokens costs as much as their
square.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from seer_core.errors import EngineError

__all__ = ["install"]

MASKS = "seer_masks"
"""The attribute of a step's batch in which they are kept."""


def install(backend: Any) -> None:
    """Have a ``TorchNativeAttnBackend`` prefill, and verify trees, like this; other layers as before."""
    original = backend.forward_extend

    def forward_extend(
        q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True
    ) -> Tensor:
        window = layer.sliding_window_size
        plain = not layer.is_cross_attention and (window is None or window < 0)
        if not plain and forward_batch.forward_mode.is_target_verify():
            raise EngineError(
                "on a CPU drafts cannot be verified in layers of sliding-window or cross attention; take the"
                " drafter out of [seer].plugins"
            )
        if not plain or layer.attn_type.name != "DECODER" or layer.qk_head_dim != layer.v_head_dim:
            result: Tensor = original(q, k, v, layer, forward_batch, save_kv_cache)
            return result
        if save_kv_cache and k is not None:
            place = KVWriteLoc(forward_batch.out_cache_loc, backend.swa_out_cache_loc)
            backend.token_to_kv_pool.set_kv_buffer(layer, place, k, v)
        return _extend(backend, q, layer, forward_batch)

    backend.forward_extend = forward_extend


def _extend(backend: Any, q: Tensor, layer: Any, forward_batch: Any) -> Tensor:
    heads, size = layer.tp_q_head_num, layer.qk_head_dim
    queries, out = q.view(-1, heads, size), torch.empty_like(q).view(-1, heads, size)
    keys, values = backend.token_to_kv_pool.get_kv_buffer(layer.layer_id)
    rows, lengths = forward_batch.req_pool_indices.tolist(), forward_batch.seq_lens.tolist()
    masks = _masks(forward_batch, lengths)
    if forward_batch.forward_mode.is_target_verify():
        sizes = [forward_batch.spec_info.draft_token_num] * len(rows)
        lengths = [length + new for length, new in zip(lengths, sizes, strict=True)]
    else:
        sizes = forward_batch.extend_seq_lens.tolist()
    begin = 0
    for row, length, new, mask in zip(rows, lengths, sizes, masks, strict=True):
        slots = backend.req_to_token_pool.req_to_token[row, :length]
        part = slice(begin, begin + new)
        out[part] = scaled_dot_product_attention(
            queries[part].transpose(0, 1)[None],
            keys[slots].transpose(0, 1)[None],
            values[slots].transpose(0, 1)[None],
            attn_mask=mask,
            is_causal=mask is None and new > 1,
            enable_gqa=heads != layer.tp_k_head_num,
            scale=layer.scaling,
        )[0].transpose(0, 1)
        begin += new
    return out.view(q.shape)


def _masks(forward_batch: Any, lengths: Sequence[int]) -> list[Tensor | None]:
    """Return what the new tokens of each request see; all layers of a step share it."""
    found: list[Tensor | None] | None = getattr(forward_batch, MASKS, None)
    if found is not None:
        return found
    if not forward_batch.forward_mode.is_target_verify():
        found = list(map(_causal, forward_batch.extend_seq_lens.tolist(), lengths))
    elif (nodes := forward_batch.spec_info.draft_token_num) == 1:
        found = [None] * len(lengths)  # the last token written sees all
    else:
        trees = forward_batch.spec_info.custom_mask.view(-1, nodes, nodes)
        found = [
            torch.cat([tree.new_ones(nodes, length), tree], 1)
            for tree, length in zip(trees, lengths, strict=True)
        ]
    setattr(forward_batch, MASKS, found)
    return found


def _causal(new: int, all: int) -> Tensor | None:
    """Return what the last ``new`` of ``all`` tokens see, [new, all]; None if they are all of them."""
    return None if new == all else torch.ones(new, all, dtype=torch.bool).tril(all - new)
