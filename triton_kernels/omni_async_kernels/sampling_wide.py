"""The last pass of the sampler: filtered rows that keep many tokens, by Gumbel-max with rejection.

The best score with noise among all tokens is the answer if the filters keep its token. If they do not, they keep only
larger logits, so the search goes on among those. What a filter keeps is told by the mass, or the number, of the larger
logits. A tile's winner that is no longer allowed is searched anew only when no other tile beats its score.
"""

import triton
import triton.language as tl

from omni_async_kernels.candidates import from_key, to_key
from omni_async_kernels.philox import gumbel_key, gumbel_tile
from omni_async_kernels.sampling_row import load_row, load_winners, row_line, scaled
from omni_async_kernels.sampling_scan import takes_few

BLOCK = tl.constexpr(4096)
"""Logits of one step through a row."""


@triton.jit
def wide_kernel(
    logits_ptr,
    logits_stride,
    slots_ptr,
    lengths_ptr,
    tables,
    place,
    vocab_size,
    num_words,
    num_tiles,
    adjusted_ptr,
    changed_ptr,
    tops_ptr,
    sums_ptr,
    winners_ptr,
    ids_ptr,
    wide_ptr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """One row, if it is `wide`: its token."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(wide_ptr + row) == 0:
        return
    slot = tl.load(slots_ptr + row)
    at = slot * tables.stride
    temperature = tl.load(tables.temperature + at)
    top_k = tl.load(tables.top_k + at)
    top_p = tl.load(tables.top_p + at)
    line = row_line(logits_ptr, logits_stride, adjusted_ptr, changed_ptr, tables, slot, row, vocab_size, num_words)
    output_index = tl.load(lengths_ptr + row).to(tl.int32) - tl.load(tables.prompt_len + at)
    key = gumbel_key(tables, slot, output_index, place)

    tile = tl.arange(0, TILES)
    inside = tile < num_tiles
    tops = tl.load(tops_ptr + row * num_tiles + tile, mask=inside, other=float("-inf"))
    best = tl.max(tops, 0)
    few = takes_few(top_k, vocab_size)
    by_rank = top_k < vocab_size
    by_mass = top_p < 1.0

    # Scores of the tiles' winners. Where the scan has made none, any score is possible.
    ids, values, scores = load_winners(
        winners_ptr + row * num_tiles, inside & (~few), line, best, temperature, key, TILES
    )
    scores = tl.where(inside & few, float("inf"), scores)

    least = tl.log(tl.load(tables.min_p + at))
    limit = 0.0
    if by_mass:
        if by_rank:
            kth = _kth(line, best, temperature, top_k, vocab_size)
            least = tl.maximum(least, kth)
            _, _, total = _measure(line, best, temperature, kth, vocab_size)
        else:
            sums = tl.load(sums_ptr + row * num_tiles + tile, mask=inside, other=0.0)
            total = tl.sum(tl.where(sums > 0, sums * tl.exp(scaled(tops, best, temperature)), 0.0), 0)
        limit = top_p * total

    # Kept are at most the numbers from `least` on that are above `above`.
    above = float("-inf")
    token = 0
    searching = 1
    while searching != 0:
        top = tl.max(scores, 0)
        first = tl.min(tl.where(scores == top, tile, TILES), 0)
        value = tl.max(tl.where(tile == first, values, float("-inf")), 0)
        token = tl.max(tl.where(tile == first, ids, 0), 0)
        if top == float("-inf"):
            searching = 0
        elif (value < least) | (value <= above):
            start = first * TILE
            new_id, new_value, new_score = _search(line, start, best, temperature, least, above, key, vocab_size, TILE)
            ids = tl.where(tile == first, new_id, ids)
            values = tl.where(tile == first, new_value, values)
            scores = tl.where(tile == first, new_score, scores)
        else:
            # The best is always kept, whatever rounding makes of the limit.
            if (by_rank | by_mass) & (value < 0.0):
                rank, mass, _ = _measure(line, best, temperature, value, vocab_size)
                if (rank < top_k) & ((mass < limit) | (~by_mass)):
                    searching = 0
                else:
                    above = value
            else:
                searching = 0
    tl.store(ids_ptr + row, token)


@triton.jit
def _search(line, start, best, temperature, least, above, key, vocab_size, TILE: tl.constexpr):
    """The Gumbel winner of a tile among the numbers from `least` on that are above `above`: id, number and score."""
    column = start + tl.arange(0, TILE)
    s = scaled(load_row(line, column, column < vocab_size), best, temperature)
    scores = tl.where((s >= least) & (s > above), s + gumbel_tile(start, key, TILE), float("-inf"))
    score, at = tl.max(scores, 0, return_indices=True)
    return start + at, tl.max(tl.where(column == start + at, s, float("-inf")), 0), score


@triton.jit
def _measure(line, best, temperature, pivot, vocab_size):
    """How many numbers are above a pivot, their mass, and that of all from the pivot on."""
    ranks = tl.zeros([BLOCK], tl.int32)
    masses = tl.zeros([BLOCK], tl.float32)
    equal = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab_size, BLOCK):
        column = start + tl.arange(0, BLOCK)
        s = scaled(load_row(line, column, column < vocab_size), best, temperature)
        weights = tl.exp(s)
        ranks += (s > pivot).to(tl.int32)
        masses += tl.where(s > pivot, weights, 0.0)
        equal += tl.where(s == pivot, weights, 0.0)
    mass = tl.sum(masses, 0)
    return tl.sum(ranks, 0), mass, mass + tl.sum(equal, 0)


@triton.jit
def _kth(line, best, temperature, k, vocab_size):
    """The k-th largest number of a row, by bisection: the least with fewer than k above it."""
    low = to_key(best - float("inf"))
    high = to_key(best - best)
    while low < high:
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        rank, _, _ = _measure(line, best, temperature, from_key(middle), vocab_size)
        if rank < k:
            high = middle
        else:
            low = middle + 1
    return from_key(low)
