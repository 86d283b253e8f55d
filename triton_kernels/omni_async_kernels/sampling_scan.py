"""The pass of the sampler over all logits: a tile of a row per program, and all that its row needs of the tile."""

import triton
import triton.language as tl

from omni_async_kernels.philox import gumbel_key, gumbel_tile
from omni_async_kernels.sampling_row import change, is_different, row_line

GREEDY_TEMPERATURE = tl.constexpr(1e-5)

MAX_FEW = tl.constexpr(512)
"""The largest top-k whose candidates are collected and sorted."""


@triton.jit
def takes_few(top_k, vocab_size):
    """Whether a random row's candidates are to be collected; other rows have a Gumbel winner in each tile."""
    return (top_k < vocab_size) & (top_k <= MAX_FEW)


@triton.jit
def scan_kernel(
    logits_ptr,
    logits_stride,
    slots_ptr,
    lengths_ptr,
    tables,
    place,
    vocab_size,
    num_words,
    adjusted_ptr,
    changed_ptr,
    tops_ptr,
    peaks_ptr,
    sums_ptr,
    winners_ptr,
    TILE: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Of one tile: the largest logit; for random rows the largest of each span, or the sum of weights and the winner.

    `tops`, `sums` and `winners` are `[S, tiles]`, `peaks` is `[S, spans]`. The top of a tile with NaN or +inf is +inf.
    """
    SPANS: tl.constexpr = TILE // SPAN
    tile = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    if slot < 0:
        return
    at = slot * tables.stride
    start = tile * TILE
    column = start + tl.arange(0, TILE)
    inside = column < vocab_size
    x = tl.load(logits_ptr + row * logits_stride + column, mask=inside, other=float("-inf")).to(tl.float32)
    temperature = tl.load(tables.temperature + at)
    line = row_line(logits_ptr, logits_stride, adjusted_ptr, changed_ptr, tables, slot, row, vocab_size, num_words)
    # This holds for NaN too.
    broken = tl.max((~(x < float("inf"))).to(tl.int32), 0)
    if is_different(line):
        x = change(x, line, column, inside)
        broken = tl.maximum(broken, tl.max((~(x < float("inf"))).to(tl.int32), 0))
    peaks = tl.max(tl.reshape(x, [SPANS, SPAN]), 1)
    top = tl.max(peaks, 0)
    out = row * tl.num_programs(0) + tile
    tl.store(tops_ptr + out, tl.where(broken != 0, float("inf"), top))
    if temperature >= GREEDY_TEMPERATURE:
        if takes_few(tl.load(tables.top_k + at), vocab_size):
            tl.store(peaks_ptr + out * SPANS + tl.arange(0, SPANS), peaks)
        else:
            scores = (x - tl.where(top == float("-inf"), 0.0, top)) * (1.0 / temperature)
            if tl.load(tables.top_p + at) < 1.0:
                tl.store(sums_ptr + out, tl.sum(tl.exp(scores), 0))
            length = tl.load(lengths_ptr + row).to(tl.int32)
            key = gumbel_key(tables, slot, length - tl.load(tables.prompt_len + at), place)
            _, winner = tl.max(scores + gumbel_tile(start, key, TILE), 0, return_indices=True)
            tl.store(winners_ptr + out, start + winner)
