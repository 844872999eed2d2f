"""The cure of a defect in vLLM 0.32's CPU build that garbles temperature, top-p and top-k.

``expand_batch_to_tokens`` repeats per-request sampling parameters per token.  On CPU it hands a kernel an
int64 copy of its output and returns the output, so anything that is not int64 comes back unwritten.  vLLM
calls it where drafts are verified; keyed sampling does not, but whoever samples in this worker gets it right.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["expand_batch_to_tokens", "install"]


def expand_batch_to_tokens(
    x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Tensor:
    """Repeat ``x[i]`` for each token of request i, ``replace_from`` becoming ``replace_to``.

    ``x`` is [batch] of any type, ``cu_num_tokens`` integer [batch], the tokens up to and including each
    request; ``num_tokens`` is the last of them.
    """
    counts = torch.diff(cu_num_tokens.to(torch.int64), prepend=cu_num_tokens.new_zeros(1, dtype=torch.int64))
    replaced = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return torch.repeat_interleave(replaced, counts, output_size=num_tokens)


def install() -> None:
    """Replace vLLM's function, where its only caller looks it up."""
    from vllm.v1.sample import rejection_sampler

    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens
