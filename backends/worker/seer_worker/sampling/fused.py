"""Keyed sampling on a device, by the kernels of ``kernels``: the tokens of ``keyed.keyed_choices``.

``chosen_by_key`` uses the kernels where they can run, and PyTorch elsewhere.

Without top-k and top-p the logits are read once, plus one of them for the log-prob.  Min-p and top-p take
their maximum first.  With top-k or top-p they are read once more, to see that the token is within, and twice
more for each token that is not.  With both the cut of top-k is looked for before: a search of four bits a
pass, so four passes over bfloat16 logits and eight over float32 ones.  A sort would move more bytes, and sums
over a sorted row of floats depend on how a device splits them.  No shape depends on data, and the host
never waits.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from seer_worker.sampling.keyed import keyed_choices, least_by_min_p

__all__ = ["BLOCK", "WARPS", "chosen_by_key", "fused_choices", "usable"]

BLOCK = 2048
"""Logits of a program."""
WARPS = 8
DIGITS = {torch.bfloat16: 4, torch.float16: 5, torch.float32: 8}
"""Digits of four bits by which two logits of a type differ at the latest."""
LAUNCH = {"num_warps": WARPS, "enable_fp_fusion": False}
"""How kernels are launched.  Triton's default for fusion changes with 3.10."""
JOINED = {**LAUNCH, "num_warps": 2 * WARPS}
"""How a program is launched that has a whole row, in blocks of twice the size."""


def chosen_by_key(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    seeds: Tensor,
    positions: Tensor,
    min_p: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return ``keyed_choices``, and the tokens' raw log-probs, float32 [rows], if kernels made them."""
    if usable(logits):
        return fused_choices(logits, temperature, top_k, top_p, seeds, positions, min_p)
    return keyed_choices(logits, temperature, top_k, top_p, seeds, positions, min_p), None


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
    searched = top_k is not None and top_p is not None
    if top_p is not None or min_p is not None:
        highest = logits.amax(dim=-1)
    if min_p is not None:
        least = least_by_min_p(highest.to(torch.float32), temperature, min_p)
    elif searched:
        least = torch.full((rows,), -torch.inf, device=logits.device)
    if searched:
        digits = DIGITS[logits.dtype]
        tallies = torch.zeros(rows, kernels.DIGITS.value, 16, dtype=torch.int32, device=logits.device)
        for digit in range(digits):
            kernels.tally[grid](
                *(logits, logits.stride(0), least, top_k, tallies, rows, vocab, digit),
                ROWS=height,
                BLOCK=width,
                **LAUNCH,
            )
        kernels.settle[grid[:1]](tallies, top_k, least, rows, digits, ROWS=height, **LAUNCH)
    limit = top_k if top_p is None else top_p
    scores, peaks, sums = empty(rows, parts), empty(rows, parts), empty(rows, parts)
    tokens, masses = empty(rows, parts, dtype=torch.int32), least
    if top_p is not None:
        masses = empty(rows, parts, dtype=torch.int64)
    keys = highest, temperature, seeds, positions
    kernels.score[grid](
        *(logits, logits.stride(0), least, *keys, scores, tokens, peaks, sums, masses, rows, vocab, parts),
        CUT=searched or min_p is not None,
        MASS=top_p is not None,
        ROWS=height,
        BLOCK=width,
        **LAUNCH,
    )
    chosen, logprobs = empty(rows, dtype=torch.int64), empty(rows)
    kernels.join[grid[:1]](
        *(logits, logits.stride(0), scores, tokens, peaks, sums, masses),
        *(temperature if limit is None else limit, *keys, chosen, logprobs, rows, vocab, parts),
        BOUND=limit is not None,
        MASS=top_p is not None,
        ROWS=height,
        BLOCK=2 * width,
        PARTS=_power_of_2(parts),
        **(LAUNCH if limit is None else JOINED),
    )
    return chosen, logprobs


def _power_of_2(count: int) -> int:
    return 1 << (count - 1).bit_length()
