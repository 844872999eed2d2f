"""Keyed sampling on a device, by the kernels of ``kernels``: the tokens of ``keyed.keyed_choices``.

Without top-k and top-p the logits are read once, plus one of them for the log-prob.  Min-p and top-p take
their maximum first.  Top-k and top-p look for the logit at which they cut: a search of four bits a pass, so
four passes over bfloat16 logits and eight over float32 ones, each.  A sort would move more bytes, and sums
over a sorted row of floats depend on how a device splits them.  No shape depends on data, and the host
never waits.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from seer_worker.sampling.keyed import least_by_min_p

__all__ = ["BLOCK", "WARPS", "fused_choices", "usable"]

BLOCK = 2048
"""Logits of a program."""
WARPS = 8
DIGITS = {torch.bfloat16: 4, torch.float16: 5, torch.float32: 8}
"""Digits of four bits by which two logits of a type differ at the latest."""
LAUNCH = {"num_warps": WARPS, "enable_fp_fusion": False}
"""How kernels are launched.  Triton's default for fusion changes with 3.10."""


def usable(logits: Tensor) -> bool:
    """Whether the kernels can sample these: they are on a GPU, and Triton is there."""
    return logits.is_cuda and logits.dtype in DIGITS and _has_triton()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def fused_choices(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    seeds: Tensor,
    positions: Tensor,
    min_p: Tensor | None = None,
    *,
    tile: tuple[int, int] = (1, BLOCK),
) -> tuple[Tensor, Tensor]:
    """Return chosen token ids, int64 [rows], and their raw log-probs, float32 [rows].

    Args:
        logits: float32, bfloat16 or float16 [rows, vocab].
        temperature: float32 [rows].
        top_k: as ``keyed.cut`` takes it.
        top_p: likewise.
        seeds: the requests' own, int64 [rows].
        positions: how many tokens stand before each row's, int64 [rows].
        min_p: as ``keyed.cut`` takes it.
        tile: rows and columns of a program, powers of two.
    """
    from seer_worker.sampling import kernels

    rows, vocab = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    height, width = tile[0], min(tile[1], _power_of_2(vocab))
    parts = -(-vocab // width)
    grid = (-(-rows // height), parts)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    highest = least = empty(0)
    cut = not (top_k is None and top_p is None and min_p is None)
    if cut:
        least = torch.full((rows,), -torch.inf, device=logits.device)
    if top_p is not None or min_p is not None:
        highest = logits.amax(dim=-1).to(torch.float32)
    if min_p is not None:
        least = least_by_min_p(highest, temperature, min_p)
    if top_p is not None:
        highest = highest.masked_fill(highest == -torch.inf, 0.0)
    digits = DIGITS[logits.dtype]
    for limit, mass in ((top_k, False), (top_p, True)):
        if limit is None:
            continue
        tallies = torch.zeros(rows, kernels.DIGITS.value, 16, dtype=torch.int64, device=logits.device)
        search: dict[str, Any] = {"MASS": mass, "ROWS": height, **LAUNCH}
        for digit in range(digits):
            kernels.tally[grid](
                *(logits, logits.stride(0), least, highest, temperature, limit, tallies, rows, vocab, digit),
                BLOCK=width,
                **search,
            )
        kernels.settle[grid[:1]](tallies, limit, least, rows, digits, **search)
    scores, peaks, sums = empty(rows, parts), empty(rows, parts), empty(rows, parts)
    tokens = empty(rows, parts, dtype=torch.int32)
    kernels.score[grid](
        *(logits, logits.stride(0), least, temperature, seeds, positions, scores, tokens, peaks, sums),
        *(rows, vocab, parts),
        CUT=cut,
        ROWS=height,
        BLOCK=width,
        **LAUNCH,
    )
    chosen, logprobs = empty(rows, dtype=torch.int64), empty(rows)
    kernels.join[grid[:1]](
        *(logits, logits.stride(0), scores, tokens, peaks, sums, chosen, logprobs, rows, parts),
        ROWS=height,
        PARTS=_power_of_2(parts),
        **LAUNCH,
    )
    return chosen, logprobs


def _power_of_2(count: int) -> int:
    return 1 << (count - 1).bit_length()
