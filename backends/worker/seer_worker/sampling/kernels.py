"""Keyed sampling in Triton: the operations of ``noise`` and ``keyed``, in the same order, on blocks.

A program has ``ROWS`` rows and ``BLOCK`` columns; one row suits a device, many suit Triton's interpreter.
Arguments that end in ``_of`` point to one value for each row.  Kernels are launched without fusion of
multiplications with additions: fused, they would round once where ``noise`` rounds twice.

A token is within top-k or top-p if there are few enough above it, or their mass is small enough: integers
both, so neither the order of blocks nor the number of rows matters.  The best token of a row is that of its
cut if it is within it.  Else all tokens up to its logit are outside, and ``join`` looks for the best one
above.  By the Gumbel-max trick that is a draw from what is above, so ln(1 / p) tokens are passed over on
average, and nearly all blocks of a later pass have no logit that counts.

Top-p of what top-k leaves takes the mass of all that is left, and so the cut of top-k itself.  A logit's key
is an unsigned integer in the order of the logits.  A search goes down the keys' digits of four bits, highest
first, to the least key above which there are less than k tokens; ``tally`` counts one digit over all blocks.
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
def _block(logits, stride, row, there, part, vocab, BLOCK: tl.constexpr):
    """Return a block's tokens [1, BLOCK], its logits [ROWS, BLOCK], and which of both there are."""
    token = part * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = there[:, None] & (token < vocab)
    x = tl.load(logits + row[:, None] * stride + token, mask=inside, other=float("-inf")).to(tl.float32)
    return token, x, inside


@triton.jit
def _search(tallies, row, there, digits, limit):
    """Return the first ``digits`` digits of each row's cut."""
    place = tallies + row[:, None] * (DIGITS * 16) + tl.arange(0, 16)[None, :]
    found, above = row * 0, row * 0
    for digit in range(digits):
        counts = tl.load(place + digit * 16, mask=there[:, None], other=0).to(tl.int64)
        beyond = above[:, None] + tl.sum(counts, 1)[:, None] - tl.cumsum(counts, 1)
        step = tl.sum((beyond >= limit[:, None]).to(tl.int64), 1)
        above = tl.sum(tl.where(tl.arange(0, 16)[None, :] == step[:, None], beyond, 0), 1)
        found = found * 16 + step
    return found


@triton.jit(do_not_specialize=["rows", "digit"])
def tally(
    logits, stride, least_of, limit_of, tallies, rows, vocab, digit, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Count, by their next digit, the tokens that share all digits before with the cut."""
    row, there = _rows(rows, ROWS)
    _token, x, inside = _block(logits, stride, row, there, tl.program_id(1), vocab, BLOCK)
    limit = tl.load(limit_of + row, mask=there, other=1)
    found = _search(tallies, row, there, digit, limit)
    key = _key(x) >> (28 - 4 * digit).to(tl.uint32)
    least = tl.load(least_of + row, mask=there, other=0.0)
    inside = inside & ((key >> 4) == found.to(tl.uint32)[:, None]) & (x >= least[:, None])
    place = tallies + row * (DIGITS * 16) + digit * 16
    for each in tl.static_range(16):
        count = tl.sum((inside & ((key & 15) == each)).to(tl.int32), 1)
        tl.atomic_add(place + each, count, mask=there, sem="relaxed")


@triton.jit(do_not_specialize=["rows", "digits"])
def settle(tallies, limit_of, least_of, rows, digits, ROWS: tl.constexpr):
    """Raise the least logit that may be drawn to the cut."""
    row, there = _rows(rows, ROWS)
    limit = tl.load(limit_of + row, mask=there, other=1)
    found = _search(tallies, row, there, digits, limit) << (32 - 4 * digits).to(tl.int64)
    key = tl.maximum(found, KEY_OF_NOTHING).to(tl.uint32)
    cut = tl.where(key >= 0x80000000, key ^ 0x80000000, ~key).to(tl.float32, bitcast=True)
    least = tl.load(least_of + row, mask=there, other=0.0)
    tl.store(least_of + row, tl.maximum(least, cut), mask=there)


@triton.jit
def _value(x, inverse, temperature, seed, position, token):
    """Return that of which the chosen token has most."""
    noise = _gumbel(seed[:, None], position[:, None], token)
    noise = tl.where((temperature < GREEDY_BELOW)[:, None], 0.0, noise)
    return x * inverse[:, None] + noise


@triton.jit
def _share(x, highest, inverse):
    """Return the mass of each token for top-p."""
    highest = tl.where(highest == float("-inf"), 0.0, highest)
    return _mass((x - highest[:, None]) * inverse[:, None])


@triton.jit(do_not_specialize=["rows"])
def score(
    logits,
    stride,
    least_of,
    highest_of,
    temperature_of,
    seed_of,
    position_of,
    scores,
    tokens,
    peaks,
    sums,
    masses,
    rows,
    vocab,
    parts,
    CUT: tl.constexpr,
    MASS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Find the best token of each block, what the block adds to the log of the sum of exponentials, and its
    mass.
    """
    row, there = _rows(rows, ROWS)
    token, x, inside = _block(logits, stride, row, there, tl.program_id(1), vocab, BLOCK)
    place = row * parts + tl.program_id(1)
    peak = tl.max(x, 1)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    tl.store(peaks + place, peak, mask=there)
    tl.store(sums + place, tl.sum(tl.exp(x - base[:, None]), 1), mask=there)
    temperature = tl.load(temperature_of + row, mask=there, other=1.0)
    seed = tl.load(seed_of + row, mask=there, other=0)
    position = tl.load(position_of + row, mask=there, other=0)
    inverse = _inverse(temperature)
    value = _value(x, inverse, temperature, seed, position, token)
    if CUT:
        least = tl.load(least_of + row, mask=there, other=0.0)
        inside = inside & (x >= least[:, None])
        value = tl.where(inside, value, float("-inf"))
    if MASS:
        highest = tl.load(highest_of + row, mask=there, other=0.0).to(tl.float32)
        mass = tl.where(inside, _share(x, highest, inverse), 0)
        tl.store(masses + place, tl.sum(mass, 1), mask=there)
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
    masses,
    limit_of,
    highest_of,
    temperature_of,
    seed_of,
    position_of,
    chosen_of,
    logprob_of,
    rows,
    vocab,
    parts,
    BOUND: tl.constexpr,
    MASS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Return the best token of all blocks within top-k or top-p, and its log-prob in the model's own
    distribution.
    """
    row, there = _rows(rows, ROWS)
    part = tl.arange(0, PARTS)[None, :]
    place, inside = row[:, None] * parts + part, there[:, None] & (part < parts)
    score = tl.load(scores + place, mask=inside, other=float("-inf"))
    _best, where = tl.max(score, 1, return_indices=True)
    token = tl.load(tokens + row * parts + where, mask=there, other=0).to(tl.int64)
    if BOUND:
        limit = tl.load(limit_of + row, mask=there, other=1)
        temperature = tl.load(temperature_of + row, mask=there, other=1.0)
        inverse = _inverse(temperature)
        if MASS:
            highest = tl.load(highest_of + row, mask=there, other=0.0).to(tl.float32)
            total = tl.sum(tl.load(masses + place, mask=inside, other=0), 1).to(tl.float64)
            target = tl.maximum(total * limit.to(tl.float64), 1.0)
            open = there & (limit < 1.0)
        else:
            target = limit.to(tl.float64)
            open = there & (limit < vocab)
        seed = tl.load(seed_of + row, mask=there, other=0)
        position = tl.load(position_of + row, mask=there, other=0)
        blocks = tl.cdiv(vocab, BLOCK)
        while tl.sum(open.to(tl.int32), 0) > 0:
            bound = tl.load(logits + row * stride + token, mask=there, other=0.0).to(tl.float32)
            above = row * 0
            for number in range(blocks):
                each, value, higher = _block(logits, stride, row, open, number, vocab, BLOCK)
                higher = higher & (value > bound[:, None])
                if tl.max(tl.max(higher.to(tl.int32), 1), 0) > 0:
                    if MASS:
                        above += tl.sum(tl.where(higher, _share(value, highest, inverse), 0), 1)
                    else:
                        above += tl.sum(higher.to(tl.int64), 1)
            open = open & (above.to(tl.float64) >= target)
            best = tl.full((ROWS,), float("-inf"), tl.float32)
            for number in range(tl.where(tl.sum(open.to(tl.int32), 0) > 0, blocks, 0)):
                each, value, higher = _block(logits, stride, row, open, number, vocab, BLOCK)
                higher = higher & (value > bound[:, None])
                if tl.max(tl.max(higher.to(tl.int32), 1), 0) > 0:
                    value = _value(value, inverse, temperature, seed, position, each)
                    value = tl.where(higher, value, float("-inf"))
                    top, column = tl.max(value, 1, return_indices=True)
                    token = tl.where(top > best, (number * BLOCK + column).to(tl.int64), token)
                    best = tl.maximum(top, best)
            open = open & (best > float("-inf"))
    peak = tl.load(peaks + place, mask=inside, other=float("-inf"))
    most = tl.max(peak, 1)
    sum = tl.sum(tl.load(sums + place, mask=inside, other=0.0) * tl.exp(peak - most[:, None]), 1)
    x = tl.load(logits + row * stride + token, mask=there, other=0.0).to(tl.float32)
    tl.store(chosen_of + row, token, mask=there)
    tl.store(logprob_of + row, x - most - tl.log(sum), mask=there)
