"""Counter-based Gumbel noise: a number depends on the token id and its row's key only.

    counter = (token id // 4, output index, choice, stage << 16 | codebook)
    key     = (low half of the seed, high half of the seed)
    uniform = ((word[token id % 4] >> 9) + 0.5) * 2**-23
    gumbel  = -log(-log(uniform))

Source: Salmon, Moraes, Dror, Shaw: Parallel Random Numbers: As Easy as 1, 2, 3. SC 2011 (Philox4x32-10).
"""

import triton
import triton.language as tl

CODEBOOK_BITS = 16


@triton.jit
def gumbel_key(tables, slot, output_index, place):
    """What a row's noise depends on, for the functions below; `place` is `stage << CODEBOOK_BITS | codebook`."""
    at = slot * tables.stride
    return (
        tl.load(tables.seed_low + at).to(tl.uint32),
        tl.load(tables.seed_high + at).to(tl.uint32),
        output_index.to(tl.uint32),
        tl.load(tables.choice + at).to(tl.uint32),
        place,
    )


@triton.jit
def gumbel_tile(start, key, TILE: tl.constexpr):
    """The noise `[TILE] f32` of the ids from `start`, a multiple of 4, on."""
    group = (start // 4 + tl.arange(0, TILE // 4)).to(tl.uint32)
    w0, w1, w2, w3 = _words(group, key)
    return _to_gumbel(tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3)))


@triton.jit
def gumbel_at(ids, key):
    """The noise of any ids."""
    w0, w1, w2, w3 = _words((ids // 4).to(tl.uint32), key)
    lane = ids % 4
    return _to_gumbel(tl.where(lane < 2, tl.where(lane == 0, w0, w1), tl.where(lane == 2, w2, w3)))


@triton.jit
def _words(group, key):
    seed_low, seed_high, output_index, choice, place = key
    zero = group & 0
    return tl.philox_impl(group, zero + output_index, zero + choice, (zero + place).to(tl.uint32), seed_low, seed_high)


@triton.jit
def _to_gumbel(words):
    # 23 bits and a half are as many as float32 holds, so the number lies strictly between 0 and 1.
    uniform = ((words >> 9).to(tl.float32) + 0.5) * (2.0**-23)
    return -tl.log(-tl.log(uniform))
