"""The noise of keyed sampling, and the logarithm and the exponential that it and top-p take.

The noise is counter-based.  SplitMix64 (Steele, Lea, Flood 2014; the constants are its own) started at
``seed`` gives, as output number ``position``, the start of a second SplitMix64 whose output number
``token`` is the noise.  Sixty-three bits of it make the uniform, so the tail that decides rare tokens
is not cut off.  Everything until then is int64 arithmetic modulo 2**64.

What follows is made of single additions and multiplications of float32, never fused, in the order written
here.  IEEE 754 rounds each of them in one way, so the noise has the same bits on every device and in
every version of its libraries, whose own logarithms differ in the last bit.  ``kernels`` has the same
operations in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

__all__ = ["gumbel", "logarithm", "mass", "noise_steps", "rough_gumbel", "splitmix64", "steps_of"]

MASK_63 = 0x7FFF_FFFF_FFFF_FFFF
GAMMA, MIX_1, MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
LEAST_UNIFORM, MOST_UNIFORM = 2.0**-64, 1.0 - 2.0**-24
LN_2, LOG2_E = 0.69314718, 1.44269504
TWO_THIRDS = 0x3F2AAAAB
"""The bits of 2/3 in float32."""

# Minimax polynomials, highest power first, by Chebyshev's nodes; errors are below a rounding of float32.
LOG_OF_REST = (
    *(1.40795672, -1.63021171, 1.20501387, -0.181571648, 0.264547586),
    *(0.243437409, 0.333662003, 0.499993742, 1.0),
)
"""-log(1 - t) / t for t in 0 .. 1/2."""
LOG_BEYOND_1 = (
    *(-0.150407642, 0.171018094, -0.164830178, 0.197965935),
    *(-0.250041455, 0.333379239, -0.499999851, 0.999999821),
)
"""log(1 + f) / f for f in -1/3 .. 1/3."""
POWER_OF_2 = (0.000109328925, 0.0012755401, 0.00957986, 0.055490933, 0.24022433, 0.69314706, 1.0)
"""2**r for r in -1 .. 0."""

ROUGH = 1e-4
"""How far ``rough_gumbel`` may be off; a hundred times as far as it was seen to be."""
MASS_BITS = 40
"""A row's highest logit weighs 2**40 in top-p, so 2**22 of them have room in an int64."""
MASS_REACH = -32.0
"""Logits below the highest by this or more weigh nothing."""


def _signed(constant: int) -> int:
    return constant - (1 << 64) if constant >> 63 else constant


_GAMMA, _MIX_1, _MIX_2 = map(_signed, (GAMMA, MIX_1, MIX_2))


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
    for shift, factor in ((30, MIX_1), (27, MIX_2), (31, None)):
        np.right_shift(z, np.uint64(shift), out=shifted)
        np.bitwise_xor(z, shifted, out=z)
        if factor is not None:
            np.multiply(z, np.uint64(factor), out=z)


def gumbel(seeds: Tensor, positions: Tensor, steps: Tensor) -> Tensor:
    """Return standard Gumbel noise, float32 [rows, vocab].

    Args:
        seeds: int64 [rows], each in 0 .. 2**63 - 1.
        positions: int64 [rows].
        steps: ``noise_steps(vocab)``, or the increments of each row's own tokens, int64 [rows, tokens].
    """
    return logarithm(_exponential(_uniform(seeds, positions, steps))).neg_()


def rough_gumbel(seeds: Ints, positions: Ints, steps: Ints) -> NDArray[np.float32]:
    """Return the same in a third of the time on a CPU, by numpy and its logarithms: off by ``ROUGH``."""
    keys = (seeds + (positions + 1) * np.int64(_GAMMA)).view(np.uint64)
    _splitmix64_numpy(keys)
    bits = keys[:, None] + steps.view(np.uint64)
    _splitmix64_numpy(bits)
    noise = np.bitwise_and(bits, np.uint64(MASK_63), out=bits).view(np.int64).astype(np.float32)
    np.multiply(noise, np.float32(2.0**-63), out=noise)
    np.clip(noise, np.float32(LEAST_UNIFORM), np.float32(MOST_UNIFORM), out=noise)
    for each in (np.negative, np.log1p, np.negative, np.log, np.negative):
        each(noise, out=noise)
    return noise


def _uniform(seeds: Tensor, positions: Tensor, steps: Tensor) -> Tensor:
    keys = splitmix64(seeds + (positions + 1) * _GAMMA)
    bits = splitmix64(keys[:, None] + steps).bitwise_and_(MASK_63)
    return bits.to(torch.float32).mul_(2.0**-63).clamp_(LEAST_UNIFORM, MOST_UNIFORM)


@lru_cache(maxsize=8)
def noise_steps(vocab: int, device: torch.device | str = "cpu") -> Tensor:
    """Return SplitMix64's increments for token ids 0 .. vocab - 1, int64 [vocab]; do not change them."""
    return steps_of(torch.arange(vocab, dtype=torch.int64, device=device))


def steps_of(tokens: Tensor) -> Tensor:
    """Return SplitMix64's increments for token ids, int64."""
    return (tokens + 1) * _GAMMA


def _exponential(uniform: Tensor) -> Tensor:
    """Return -log(1 - u), float32, with full precision where it is small: there the Gumbel is large.

    Above 1/2, 1 - u is exact: 1 - ``small``, halved so many times.
    """
    bits = (1.0 - uniform.clamp(min=0.5)).view(torch.int32)
    halvings = (126 - (bits >> 23)).to(torch.float32)
    halved = bits.bitwise_and_(0x7FFFFF).bitwise_or_(0x3F000000).view(torch.float32)
    small = torch.minimum(uniform, 1.0 - halved)  # up to 1/2 it is the uniform itself
    return halvings.mul_(LN_2).add_(_polynomial(small, LOG_OF_REST).mul_(small))


def logarithm(x: Tensor) -> Tensor:
    """Return the natural logarithm of positive normal numbers, float32."""
    bits = x.view(torch.int32)
    exponent = (bits - TWO_THIRDS) >> 23
    beyond = (bits - (exponent << 23)).view(torch.float32).sub_(1.0)
    return exponent.to(torch.float32).mul_(LN_2).add_(_polynomial(beyond, LOG_BEYOND_1).mul_(beyond))


def mass(below: Tensor) -> Tensor:
    """Return exp(below) * 2**40, rounded down to int64, whose sums do not depend on their order.

    Args:
        below: float32, at most 0.
    """
    exponent = below.clamp(min=MASS_REACH).mul_(LOG2_E)
    whole = exponent.to(torch.int32)
    power = _polynomial(exponent.sub_(whole), POWER_OF_2)
    scale = ((whole + (127 + MASS_BITS)) << 23).view(torch.float32)
    return power.mul_(scale).to(torch.int64)


def _polynomial(x: Tensor, coefficients: Sequence[float]) -> Tensor:
    """Evaluate a polynomial by Horner's rule, highest power first."""
    first, second, *others = coefficients
    value = (x * first).add_(second)
    for each in others:
        value.mul_(x).add_(each)
    return value
