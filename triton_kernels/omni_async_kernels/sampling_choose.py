"""The second pass of the sampler: from the tiles' results to a token, for all rows but those with a wide choice."""

import triton
import triton.language as tl

from omni_async_kernels.candidates import CAPACITY, collect, load_sorted, unpack
from omni_async_kernels.philox import gumbel_at, gumbel_key
from omni_async_kernels.sampling_row import first_best, load_row, load_winners, row_line
from omni_async_kernels.sampling_scan import GREEDY_TEMPERATURE, takes_few

SHORT = tl.constexpr(128)
"""Few candidates are sorted in a shorter list."""


@triton.jit
def choose_kernel(
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
    peaks_ptr,
    winners_ptr,
    list_ptr,
    found_ptr,
    ids_ptr,
    finite_ptr,
    wide_ptr,
    TILE: tl.constexpr,
    SPAN: tl.constexpr,
    TILES: tl.constexpr,
):
    """One row: finite or not, and its token; or `wide` if that takes passes over the whole row."""
    SPANS: tl.constexpr = TILE // SPAN
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    if slot < 0:
        tl.store(ids_ptr + row, 0)
        tl.store(finite_ptr + row, 1)
        tl.store(wide_ptr + row, 0)
        return
    at = slot * tables.stride
    tile = tl.arange(0, TILES)
    inside = tile < num_tiles
    tops = tl.load(tops_ptr + row * num_tiles + tile, mask=inside, other=float("-inf"))
    length = tl.load(lengths_ptr + row).to(tl.int32)
    temperature = tl.load(tables.temperature + at)
    top_k = tl.load(tables.top_k + at)
    top_p = tl.load(tables.top_p + at)
    min_p = tl.load(tables.min_p + at)
    line = row_line(logits_ptr, logits_stride, adjusted_ptr, changed_ptr, tables, slot, row, vocab_size, num_words)
    best = tl.max(tops, 0)
    finite = (best > float("-inf")) & (best < float("inf"))
    token = 0
    wide = 0
    if finite:
        if temperature >= GREEDY_TEMPERATURE:
            key = gumbel_key(tables, slot, length - tl.load(tables.prompt_len + at), place)
            if takes_few(top_k, vocab_size):
                num_spans = num_tiles * SPANS
                found = found_ptr + row * CAPACITY
                count = collect(
                    line,
                    best,
                    temperature,
                    top_k,
                    vocab_size,
                    peaks_ptr + row * num_spans,
                    num_spans,
                    list_ptr + row * num_spans,
                    found,
                    TILES * SPANS,
                    SPAN,
                )
                if count <= SHORT:
                    token = _draw(found, count, top_k, top_p, min_p, key, SHORT)
                elif count <= CAPACITY:
                    token = _draw(found, count, top_k, top_p, min_p, key, CAPACITY)
                else:
                    wide = 1
            elif (top_k < vocab_size) | (top_p < 1.0) | (min_p > 0.0):
                wide = 1
            else:
                ids, _, scores = load_winners(
                    winners_ptr + row * num_tiles, inside, line, best, temperature, key, TILES
                )
                token = first_best(scores, ids)
        else:
            column = tl.min(tl.where(tops == best, tile, TILES), 0) * TILE + tl.arange(0, TILE)
            token = first_best(load_row(line, column, column < vocab_size), column)
    tl.store(ids_ptr + row, token)
    tl.store(finite_ptr + row, finite)
    tl.store(wide_ptr + row, wide)


@triton.jit
def _draw(found_ptr, count, top_k, top_p, min_p, key, SIZE: tl.constexpr):
    """A token from sorted candidates, which hold all that top-k keeps: the best by Gumbel-max of what is kept."""
    packed = load_sorted(found_ptr, count, SIZE)
    at = tl.arange(0, SIZE)
    s, ids = unpack(packed)
    s = tl.where(at < count, s, float("-inf"))
    # Numbers as good as the k-th are kept with it, and so are those as good as the one that crosses top-p's border.
    kth = tl.max(tl.where(at == top_k - 1, s, float("-inf")), 0)
    bound = tl.maximum(tl.log(min_p), kth)
    if top_p < 1.0:
        weights = tl.where(s >= kth, tl.exp(s), 0.0).to(tl.float64)
        limit = top_p.to(tl.float64) * tl.sum(weights, 0)
        crossing = tl.sum((tl.cumsum(weights, 0) < limit).to(tl.int32), 0)
        bound = tl.maximum(bound, tl.max(tl.where(at == crossing, s, float("-inf")), 0))
    scores = tl.where((s >= bound) & (at < count), s + gumbel_at(ids, key), float("-inf"))
    return first_best(scores, ids)
