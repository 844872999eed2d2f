"""Keyed sampling in Triton: the operations of ``noise`` and ``keyed``, in the same order, on blocks.

A program has ``ROWS`` rows and ``BLOCK`` columns; one row suits a device, many suit Triton's interpreter.
Arguments that end in ``_of`` point to one value for each row.  Kernels are launched without fusion of
multiplications with additions: fused, they would round once where ``noise`` rounds twice.

A logit's key is an unsigned integer in the order of the logits.  A search goes down the keys' digits of four
bits, highest first: it looks for the least key above which there is less than a row's target of tokens
(top-k) or of their mass (top-p).  ``tally`` adds up one digit's shares over all blocks; they are integers, so
neither the order of blocks nor the number of rows matters.
"""

from __future__ import annotations

import triton
import triton.language as tl

from seer_worker.sampling import keyed, noise

GAMMA, MIX_1, MIX_2 = (tl.constexpr(each) for each in (noise.GAMMA, noise.MIX_1, noise.MIX_2))
MASK_63 = tl.constexpr(noise.MASK_63)
LEAST_UNIFORM, MOST_UNIFORM = tl.constexpr(noise.LEAST_UNIFORM), tl.constexpr(noise.MOST_UNIFORM)
LN_2, LOG2_E = tl.constexpr(noise.LN_2), tl.constexpr(noise.LOG2_E)
TWO_THIRDS = tl.constexpr(noise.TWO_THIRDS)
LOG_OF_REST, LOG_OF_REST_COUNT = tl.constexpr(noise.LOG_OF_REST), tl.constexpr(len(noise.LOG_OF_REST))
LOG_BEYOND_1, LOG_BEYOND_1_COUNT = tl.constexpr(noise.LOG_BEYOND_1), tl.constexpr(len(noise.LOG_BEYOND_1))
POWER_OF_2, POWER_OF_2_COUNT = tl.constexpr(noise.POWER_OF_2), tl.constexpr(len(noise.POWER_OF_2))
MASS_BIAS, MASS_REACH = tl.constexpr(127 + noise.MASS_BITS), tl.constexpr(noise.MASS_REACH)
GREEDY_BELOW = tl.constexpr(keyed.GREEDY_BELOW)
DIGITS = tl.constexpr(8)
"""The digits of a key for which a tally has room."""
KEY_OF_NOTHING = tl.constexpr(0x007FFFFF)
"""The key of minus infinity."""


@triton.jit
def _polynomial(x, COEFFICIENTS: tl.constexpr, COUNT: tl.constexpr):
    value = x * COEFFICIENTS[0] + COEFFICIENTS[1]
    for place in tl.static_range(2, COUNT):
        value = value * x + COEFFICIENTS[place]
    return value


@triton.jit
def _splitmix64(z):
    z = (z ^ (z >> 30)) * MIX_1
    z = (z ^ (z >> 27)) * MIX_2
    return z ^ (z >> 31)


@triton.jit
def _gumbel(seed, position, token):
    key = _splitmix64(seed.to(tl.uint64) + (position + 1).to(tl.uint64) * GAMMA)
    bits = _splitmix64(key + (token + 1).to(tl.uint64) * GAMMA) & MASK_63
    uniform = bits.to(tl.int64).to(tl.float32) * 1.0842021724855044e-19  # 2**-63
    uniform = tl.minimum(tl.maximum(uniform, LEAST_UNIFORM), MOST_UNIFORM)
    # -log(1 - u)
    rest = (1.0 - tl.maximum(uniform, 0.5)).to(tl.int32, bitcast=True)
    halvings = (126 - (rest >> 23)).to(tl.float32)
    halved = ((rest & 0x7FFFFF) | 0x3F000000).to(tl.float32, bitcast=True)
    small = tl.minimum(uniform, 1.0 - halved)
    exponential = halvings * LN_2 + _polynomial(small, LOG_OF_REST, LOG_OF_REST_COUNT) * small
    # -log of it
    bits = exponential.to(tl.int32, bitcast=True)
    exponent = (bits - TWO_THIRDS) >> 23
    beyond = (bits - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0
    return -(exponent.to(tl.float32) * LN_2 + _polynomial(beyond, LOG_BEYOND_1, LOG_BEYOND_1_COUNT) * beyond)


@triton.jit
def _mass(below):
    exponent = tl.maximum(below, MASS_REACH) * LOG2_E
    whole = exponent.to(tl.int32)
    power = _polynomial(exponent - whole.to(tl.float32), POWER_OF_2, POWER_OF_2_COUNT)
    scale = ((whole + MASS_BIAS) << 23).to(tl.float32, bitcast=True)
    return (power * scale).to(tl.int64)


@triton.jit
def _key(x):
    bits = tl.where(x == 0.0, 0.0, x).to(tl.uint32, bitcast=True)  # -0.0 is 0.0
    return tl.where(bits >= 0x80000000, ~bits, bits | 0x80000000)


@triton.jit
def _inverse(temperature):
    return tl.where(temperature < GREEDY_BELOW, 1.0, tl.div_rn(1.0, tl.maximum(temperature, GREEDY_BELOW)))


@triton.jit
def _rows(rows, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    return row, row < rows


@triton.jit
def _block(logits, stride, row, there, vocab, BLOCK: tl.constexpr):
    """Return a block's tokens [1, BLOCK], its logits [ROWS, BLOCK], and which of both there are."""
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = there[:, None] & (token < vocab)
    x = tl.load(logits + row[:, None] * stride + token, mask=inside, other=float("-inf")).to(tl.float32)
    return token, x, inside


@triton.jit
def _search(tallies, row, there, digits, limit, MASS: tl.constexpr):
    """Return the first ``digits`` digits of each row's cut."""
    place = tallies + row[:, None] * (DIGITS * 16) + tl.arange(0, 16)[None, :]
    target = limit.to(tl.float64)
    if MASS:
        total = tl.sum(tl.load(place, mask=there[:, None], other=0), 1).to(tl.float64)
        target = tl.where(limit < 1.0, tl.maximum(total * target, 1.0), float("inf"))
    found, above = row * 0, row * 0
    for digit in range(digits):
        shares = tl.load(place + digit * 16, mask=there[:, None], other=0)
        beyond = above[:, None] + tl.sum(shares, 1)[:, None] - tl.cumsum(shares, 1)
        step = tl.sum((beyond.to(tl.float64) >= target[:, None]).to(tl.int64), 1)
        above = tl.sum(tl.where(tl.arange(0, 16)[None, :] == step[:, None], beyond, 0), 1)
        found = found * 16 + step
    return found


@triton.jit(do_not_specialize=["rows", "digit"])
def tally(
    logits,
    stride,
    least_of,
    highest_of,
    temperature_of,
    limit_of,
    tallies,
    rows,
    vocab,
    digit,
    MASS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add up, by their next digit, the tokens or the mass that share all digits before with the cut."""
    row, there = _rows(rows, ROWS)
    _token, x, inside = _block(logits, stride, row, there, vocab, BLOCK)
    limit = tl.load(limit_of + row, mask=there, other=1)
    found = _search(tallies, row, there, digit, limit, MASS)
    key = _key(x) >> (28 - 4 * digit).to(tl.uint32)
    least = tl.load(least_of + row, mask=there, other=0.0)
    inside = inside & ((key >> 4) == found.to(tl.uint32)[:, None]) & (x >= least[:, None])
    if MASS:
        highest = tl.load(highest_of + row, mask=there, other=0.0)
        inverse = _inverse(tl.load(temperature_of + row, mask=there, other=1.0))
        share = tl.where(inside, _mass((x - highest[:, None]) * inverse[:, None]), 0)
    else:
        share = inside.to(tl.int32)
    place = tallies + row * (DIGITS * 16) + digit * 16
    for each in tl.static_range(16):
        total = tl.sum(tl.where((key & 15) == each, share, 0), 1)
        tl.atomic_add(place + each, total.to(tl.int64), mask=there, sem="relaxed")


@triton.jit(do_not_specialize=["rows", "digits"])
def settle(tallies, limit_of, least_of, rows, digits, MASS: tl.constexpr, ROWS: tl.constexpr):
    """Raise the least logit that may be drawn to the cut."""
    row, there = _rows(rows, ROWS)
    limit = tl.load(limit_of + row, mask=there, other=1)
    found = _search(tallies, row, there, digits, limit, MASS) << (32 - 4 * digits).to(tl.int64)
    key = tl.maximum(found, KEY_OF_NOTHING).to(tl.uint32)
    cut = tl.where(key >= 0x80000000, key ^ 0x80000000, ~key).to(tl.float32, bitcast=True)
    least = tl.load(least_of + row, mask=there, other=0.0)
    tl.store(least_of + row, tl.maximum(least, cut), mask=there)


@triton.jit(do_not_specialize=["rows"])
def score(
    logits,
    stride,
    least_of,
    temperature_of,
    seed_of,
    position_of,
    scores,
    tokens,
    peaks,
    sums,
    rows,
    vocab,
    parts,
    CUT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Find the best token of each block, and what the block adds to the log of the sum of exponentials."""
    row, there = _rows(rows, ROWS)
    token, x, _inside = _block(logits, stride, row, there, vocab, BLOCK)
    place = row * parts + tl.program_id(1)
    peak = tl.max(x, 1)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    tl.store(peaks + place, peak, mask=there)
    tl.store(sums + place, tl.sum(tl.exp(x - base[:, None]), 1), mask=there)
    temperature = tl.load(temperature_of + row, mask=there, other=1.0)
    seed = tl.load(seed_of + row, mask=there, other=0)
    position = tl.load(position_of + row, mask=there, other=0)
    noise = _gumbel(seed[:, None], position[:, None], token)
    noise = tl.where((temperature < GREEDY_BELOW)[:, None], 0.0, noise)
    value = x * _inverse(temperature)[:, None] + noise
    if CUT:
        least = tl.load(least_of + row, mask=there, other=0.0)
        value = tl.where(x >= least[:, None], value, float("-inf"))
    best, where = tl.max(value, 1, return_indices=True)
    tl.store(scores + place, best, mask=there)
    tl.store(tokens + place, tl.program_id(1) * BLOCK + where, mask=there)


@triton.jit(do_not_specialize=["rows"])
def join(
    logits,
    stride,
    scores,
    tokens,
    peaks,
    sums,
    chosen_of,
    logprob_of,
    rows,
    parts,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Return the best token of all blocks, and its log-prob in the model's own distribution."""
    row, there = _rows(rows, ROWS)
    part = tl.arange(0, PARTS)[None, :]
    place, inside = row[:, None] * parts + part, there[:, None] & (part < parts)
    score = tl.load(scores + place, mask=inside, other=float("-inf"))
    _best, where = tl.max(score, 1, return_indices=True)
    token = tl.load(tokens + row * parts + where, mask=there, other=0).to(tl.int64)
    peak = tl.load(peaks + place, mask=inside, other=float("-inf"))
    highest = tl.max(peak, 1)
    total = tl.sum(tl.load(sums + place, mask=inside, other=0.0) * tl.exp(peak - highest[:, None]), 1)
    x = tl.load(logits + row * stride + token, mask=there, other=0.0).to(tl.float32)
    tl.store(chosen_of + row, token, mask=there)
    tl.store(logprob_of + row, x - highest - tl.log(total), mask=there)
