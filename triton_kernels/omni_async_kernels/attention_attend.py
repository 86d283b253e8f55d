"""The inner loop of attention: softmax and weighted sum over a range of cached positions, one tile at a time.

Online softmax: Milakov and Gimelshein, "Online normalizer calculation for softmax", arXiv 1805.02867.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class Scoring:
    """The numbers that turn a product of query and stored key into an exponent of base 2."""

    factor: float
    """Of the product, or of the argument of `tanh`."""
    cap: float
    """Of `tanh`; 0: none."""

    @classmethod
    def of(cls, scale: float, soft_cap: float | None) -> "Scoring":
        """Scores are `scale * q k`, or `soft_cap * tanh(scale * q k / soft_cap)`."""
        if soft_cap is None:
            return cls(scale * LOG2_E, 0.0)
        return cls(scale / soft_cap, soft_cap * LOG2_E)


@triton.jit
def first_blocks(table_ptr, start, end, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The cache blocks of the first `BLOCK_N` of the positions `start .. end`; past the L1 cache."""
    position = start + tl.arange(0, BLOCK_N)
    return tl.load(table_ptr + position.to(tl.uint32) // BLOCK_SIZE, mask=position < end, other=0, cache_modifier=".cg")


@triton.jit
def exponents(products, factor, cap, CAPPED: tl.constexpr):
    """Exponents of base 2 from products of query and stored key."""
    scores = products * factor
    if CAPPED:
        scores = (2 * tl.sigmoid(2 * scores) - 1) * cap
    return scores


@triton.jit
def attend(
    q,
    block,
    start,
    end,
    seen_start,
    seen_end,
    last,
    table_ptr,
    k_ptr,
    v_ptr,
    factor,
    cap,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`attend_further` of queries that have seen nothing yet. `block`: `first_blocks` of the range."""
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    return attend_further(
        q, m, total, acc, block, start, end, seen_start, seen_end, last, table_ptr, k_ptr, v_ptr, factor, cap,
        NUM_KV_HEADS, HEAD_SIZE, BLOCK_SIZE, BLOCK_D, BLOCK_N, NUM_STAGES, WINDOW, CAPPED, PRECISION,
    )  # fmt: skip


@triton.jit
def attend_further(
    q,
    m,
    total,
    acc,
    block,
    start,
    end,
    seen_start,
    seen_end,
    last,
    table_ptr,
    k_ptr,
    v_ptr,
    factor,
    cap,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attention of queries `[M, D]` over the positions `start .. end`, and the logarithm of its sum of exponentials.

    `m [M]`, `total [M]` and `acc [M, D]`: the highest exponent, the sum of exponentials relative to it and the sum of
    values weighted by them, of what was seen before. Query row i sees the positions up to `last[i]`, the last `WINDOW`
    of them if that is not 0; all rows see those of `seen_start .. seen_end`. `block`: `first_blocks` of the range.
    Nothing outside `start .. end` is read. `k_ptr` and `v_ptr` point to the key head.
    """
    d = tl.arange(0, BLOCK_D)
    offset = tl.arange(0, BLOCK_N)
    for n in tl.range(start, end, BLOCK_N, num_stages=NUM_STAGES):
        position = n + offset
        present = (position < end)[:, None] & (d < HEAD_SIZE)[None, :]
        # Unsigned, and the factor last: a few instructions for each position, of which a thread has many.
        place = block.to(tl.uint32) * BLOCK_SIZE + position.to(tl.uint32) % BLOCK_SIZE
        at = (place.to(tl.int64) * (NUM_KV_HEADS * HEAD_SIZE))[:, None]
        # Of the next tile: its keys and values are then asked for without waiting.
        coming = position + BLOCK_N
        block = tl.load(table_ptr + coming.to(tl.uint32) // BLOCK_SIZE, mask=coming < end, other=0)
        k = tl.load(k_ptr + d[None, :] + at, mask=present, other=0.0)
        products = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION)
        scores = exponents(products, factor, cap, CAPPED)
        if (n < seen_start) | (n + BLOCK_N > seen_end):
            visible = (position < end)[None, :] & (position[None, :] <= last[:, None])
            if WINDOW > 0:
                visible = visible & (position[None, :] > last[:, None] - WINDOW)
            scores = tl.where(visible, scores, float("-inf"))
        new_m = tl.maximum(m, tl.max(scores, axis=1))
        # A row that has seen nothing yet: its maximum is -inf, and -inf - -inf is no number.
        base = tl.where(new_m == float("-inf"), 0.0, new_m)
        weight = tl.exp2(scores - base[:, None])
        fade = tl.exp2(m - base)
        total = total * fade + tl.sum(weight, axis=1)
        v = tl.load(v_ptr + d[None, :] + at, mask=present, other=0.0)
        acc = tl.dot(weight.to(q.dtype), v.to(q.dtype), acc * fade[:, None], input_precision=PRECISION)
        m = new_m
    # A row that saw nothing, such as one before whose window all of this lies: its logarithm is -inf.
    total = tl.where(total == 0, 1.0, total)
    return acc / total[:, None], m + tl.log2(total)
