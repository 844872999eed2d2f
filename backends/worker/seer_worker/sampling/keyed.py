"""Keyed sampling: the token at a position depends on (seed, position, logits) and on nothing else.

    token = argmax(logits / temperature after top-k and top-p + Gumbel(seed, position, token))

The Gumbel-max trick (Gumbel 1954; Maddison et al. 2014, arXiv:1411.0030) draws exactly from the
softmax of its argument, so keyed sampling has the distribution of ordinary sampling.  The position is
the number of tokens before the sampled one, prompt included.  So a response is the same with any
chunks, its batch, its instance, and however often it was preempted or moved.

The noise is counter-based.  SplitMix64 (Steele, Lea, Flood 2014; the constants are its own) started at
``seed`` gives, as output number ``position``, the start of a second SplitMix64 whose output number
``token`` is the noise.  Sixty-three bits of it make the uniform, so the tail that decides rare tokens
is not cut off.  Everything is int64 arithmetic modulo 2**64, the same on every device.

Drafts are verified by the same rule: every row of logits, whether it follows a draft token or a settled
one, is sampled by key at its own position; a draft is accepted exactly when it is the token so sampled, and
the first that is not ends the row.  So drafts change how many steps a response takes, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

__all__ = [
    "PLACEHOLDER",
    "gumbel",
    "keyed_choice",
    "keyed_choices",
    "mask_top_k_top_p",
    "noise_steps",
    "rows_at_once",
    "splitmix64",
    "verify",
]

GREEDY_BELOW = 1e-5
CPU_BLOCK = 1 << 15
"""Logits sampled at a time on a CPU: their noise, eight bytes each while it is hashed, stays in the cache."""
GPU_BLOCK = 1 << 26
PLACEHOLDER = -1

_MASK_63 = 0x7FFF_FFFF_FFFF_FFFF
_GAMMA_UNSIGNED, _MIX_1_UNSIGNED, _MIX_2_UNSIGNED = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _signed(constant: int) -> int:
    return constant - (1 << 64) if constant >> 63 else constant


_GAMMA, _MIX_1, _MIX_2 = map(_signed, (_GAMMA_UNSIGNED, _MIX_1_UNSIGNED, _MIX_2_UNSIGNED))


def splitmix64(z: Tensor) -> Tensor:
    """Apply SplitMix64's finaliser to int64 ``z``, in place."""
    if z.device.type == "cpu":
        _splitmix64_numpy(z.numpy().view(np.uint64))
        return z
    # ``&`` makes the shifts logical.
    z.bitwise_xor_((z >> 30).bitwise_and_((1 << 34) - 1)).mul_(_MIX_1)
    z.bitwise_xor_((z >> 27).bitwise_and_((1 << 37) - 1)).mul_(_MIX_2)
    return z.bitwise_xor_((z >> 31).bitwise_and_((1 << 33) - 1))


def _splitmix64_numpy(z: NDArray[np.uint64]) -> None:
    """Do the same in half the time: numpy has unsigned shifts, and less to do before each of them."""
    shifted = np.empty_like(z)
    for shift, factor in ((30, _MIX_1_UNSIGNED), (27, _MIX_2_UNSIGNED), (31, None)):
        np.right_shift(z, np.uint64(shift), out=shifted)
        np.bitwise_xor(z, shifted, out=z)
        if factor is not None:
            np.multiply(z, np.uint64(factor), out=z)


def gumbel(seeds: Tensor, positions: Tensor, steps: Tensor) -> Tensor:
    """Return standard Gumbel noise, float32 [rows, vocab].

    Args:
        seeds: int64 [rows], each in 0 .. 2**63 - 1.
        positions: int64 [rows].
        steps: ``noise_steps(vocab)``.
    """
    keys = splitmix64(seeds + (positions + 1) * _GAMMA)
    bits = splitmix64(keys[:, None] + steps).bitwise_and_(_MASK_63)
    # The exponential -log1p(-u) is small, and the Gumbel large, where u is small: there float32 is finest.
    uniform = bits.to(torch.float32).mul_(2.0**-63).clamp_(2.0**-64, 1.0 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def noise_steps(vocab: int, device: torch.device | str = "cpu") -> Tensor:
    """Return SplitMix64's increments for token ids 0 .. vocab - 1, int64 [vocab]."""
    return torch.arange(1, vocab + 1, dtype=torch.int64, device=device) * _GAMMA


def mask_top_k_top_p(logits: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """Set logits outside top-k, then outside top-p of what is left, to -inf.

    The cut is a value, never an index: equal logits stay or go together, so the result does not
    depend on how a sort breaks ties.

    Args:
        logits: float32 [rows, vocab].
        top_k: integer [rows], ``vocab`` for no limit, or None.
        top_p: float32 [rows], 1 for no limit, or None.
    """
    if top_k is None and top_p is None:
        return logits
    ranked = logits.sort(dim=-1, descending=True).values
    if top_k is not None:
        cut = ranked.gather(1, top_k.to(torch.int64)[:, None] - 1)
        ranked = ranked.masked_fill(ranked < cut, -torch.inf)
        logits = logits.masked_fill(logits < cut, -torch.inf)
    if top_p is not None:
        probabilities = ranked.softmax(dim=-1)
        before = probabilities.cumsum(dim=-1) - probabilities
        kept = (before < top_p[:, None]).sum(dim=-1, keepdim=True).clamp_(min=1)
        cut = ranked.gather(1, kept - 1)
        logits = logits.masked_fill((logits < cut) & (top_p[:, None] < 1), -torch.inf)
    return logits


def keyed_choice(
    logits: Tensor, temperature: Tensor, top_k: Tensor | None, top_p: Tensor | None, noise: Tensor
) -> Tensor:
    """Return the chosen token ids, int64 [rows]; a row of temperature 0 is greedy.

    Args:
        logits: float32 [rows, vocab].
        temperature: float32 [rows].
        top_k: as ``mask_top_k_top_p`` takes it.
        top_p: likewise.
        noise: ``gumbel`` of the rows.
    """
    greedy = temperature < GREEDY_BELOW
    if not greedy.any():
        return (mask_top_k_top_p(logits / temperature[:, None], top_k, top_p) + noise).argmax(dim=-1)
    scaled = logits / torch.where(greedy, 1.0, temperature)[:, None]
    chosen = (mask_top_k_top_p(scaled, top_k, top_p) + noise).argmax(dim=-1)
    return torch.where(greedy, logits.argmax(dim=-1), chosen)


def keyed_choices(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    seeds: Tensor,
    positions: Tensor,
    steps: Tensor,
) -> Tensor:
    """Return the chosen token ids, int64 [rows]: as many rows at a time as suit the device.

    Args:
        logits: float32 [rows, vocab].
        temperature: float32 [rows].
        top_k: as ``mask_top_k_top_p`` takes it.
        top_p: likewise.
        seeds: the requests' own, int64 [rows].
        positions: how many tokens stand before each row's, int64 [rows].
        steps: ``noise_steps(vocab)``.
    """
    rows, vocab = logits.shape
    block = max(1, _block(logits.device) // vocab)
    chosen = [
        keyed_choice(
            logits[part],
            temperature[part],
            None if top_k is None else top_k[part],
            None if top_p is None else top_p[part],
            gumbel(seeds[part], positions[part], steps),
        )
        for part in (slice(start, start + block) for start in range(0, rows, block))
    ]
    return chosen[0] if len(chosen) == 1 else torch.cat(chosen)


def rows_at_once(logits: Tensor) -> int:
    """Return how many rows of these ``verify`` should have sampled together."""
    return max(1, 4 * _block(logits.device) // logits.shape[1])


def _block(device: torch.device) -> int:
    return CPU_BLOCK if device.type == "cpu" else GPU_BLOCK


def verify(
    choose: Callable[[Ints], Ints], counts: Ints, drafts: Ints, last: Ints, rows_at_once: int
) -> tuple[Ints, Ints]:
    """Follow each request's drafts as far as they are what is sampled.

    A request ends with the first token that is not its draft, with the token after its last draft, or with
    one that ends responses.

    Args:
        choose: samples rows of logits, given by ascending index.
        counts: drafts per request.  Request i has ``counts[i] + 1`` rows of logits.
        drafts: all draft tokens, request by request.
        last: tokens that end a response; what follows them is not looked at.
        rows_at_once: rows sampled together before it is clear which of them count.  Few: no work is wasted
            on rows behind a mismatch.  Many: fewer and larger calls of ``choose``.

    Returns:
        The token sampled in each row, and how many of its rows each request keeps.
    """
    rows = counts + 1
    ends = np.cumsum(rows)
    first = ends - rows
    drafted = np.ones(ends[-1], dtype=np.bool_)
    drafted[ends - 1] = False
    wanted = np.full(ends[-1], PLACEHOLDER, dtype=np.int64)
    wanted[drafted] = drafts
    sampled = np.full(ends[-1], PLACEHOLDER, dtype=np.int64)
    kept = np.zeros_like(counts)
    going, start = np.arange(len(counts)), 0
    while len(going):
        many = max(rows_at_once // len(going), 1)
        sizes = np.minimum(rows[going] - start, many)
        stops = np.cumsum(sizes)
        starts = stops - sizes
        part = np.repeat(first[going] + start - starts, sizes) + np.arange(stops[-1])
        found = choose(part)
        sampled[part] = found
        goes_on = found == wanted[part]
        for token in last:
            goes_on &= found != token
        # The first row of each request that does not go on; the end of all rows where there is none.
        halts = np.append(np.flatnonzero(~goes_on), stops[-1])
        halt = halts[np.searchsorted(halts, starts)]
        kept[going] += np.minimum(halt + 1 - starts, sizes)
        going, start = going[halt >= stops], start + many
    return sampled, kept
