"""Log-probabilities of raw logits: of one given token a row, its rank, and the best tokens."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from omni_async_kernels.candidates import CAPACITY, LEAST, collect, load_sorted, pack, unpack
from omni_async_kernels.launch import launch
from omni_async_kernels.sampling_scan import MAX_FEW
from omni_async_kernels.sampling_tables import SamplingTables, table_arguments
from omni_async_kernels.sampling_tiling import Tiling

BLOCK = tl.constexpr(4096)
"""Logits of one step through a row."""

SHORT = tl.constexpr(128)
"""Few candidates are sorted in a shorter list."""


@triton.jit
def _measure_kernel(
    logits_ptr,
    logits_stride,
    slots_ptr,
    ids_ptr,
    tables,
    vocab_size,
    tops_ptr,
    sums_ptr,
    ranks_ptr,
    peaks_ptr,
    TILE: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Of one tile: the largest logit, the sum of weights, how many are above the given one; and the spans' largest."""
    SPANS: tl.constexpr = TILE // SPAN
    tile = tl.program_id(0)
    num_tiles = tl.num_programs(0)
    row = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    if slot < 0:
        return
    if tl.load(tables.num_logprobs + slot * tables.stride) < 0:
        return
    line = logits_ptr + row * logits_stride
    column = tile * TILE + tl.arange(0, TILE)
    x = tl.load(line + column, mask=column < vocab_size, other=float("-inf")).to(tl.float32)
    given = tl.load(line + tl.load(ids_ptr + row)).to(tl.float32)
    peaks = tl.max(tl.reshape(x, [SPANS, SPAN]), 1)
    top = tl.max(peaks, 0)
    out = row * num_tiles + tile
    tl.store(tops_ptr + out, top)
    tl.store(sums_ptr + out, tl.sum(tl.exp(x - tl.where(top == float("-inf"), 0.0, top)), 0))
    tl.store(ranks_ptr + out, tl.sum((x > given).to(tl.int32), 0))
    tl.store(peaks_ptr + out * SPANS + tl.arange(0, SPANS), peaks)


@triton.jit
def _logprobs_kernel(
    logits_ptr,
    logits_stride,
    slots_ptr,
    ids_ptr,
    tables,
    vocab_size,
    num_tiles,
    tops_ptr,
    sums_ptr,
    ranks_ptr,
    peaks_ptr,
    list_ptr,
    found_ptr,
    chosen_ptr,
    rank_ptr,
    top_ids_ptr,
    top_ptr,
    max_top,
    SPANS: tl.constexpr,
    SPAN: tl.constexpr,
    TILES: tl.constexpr,
):
    """One row, from its tiles' results."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    if slot < 0:
        return
    num_logprobs = tl.load(tables.num_logprobs + slot * tables.stride)
    if num_logprobs < 0:
        return
    logits = logits_ptr + row * logits_stride
    tile = tl.arange(0, TILES)
    inside = tile < num_tiles
    at = row * num_tiles + tile
    tops = tl.load(tops_ptr + at, mask=inside, other=float("-inf"))
    best = tl.max(tops, 0)
    sums = tl.load(sums_ptr + at, mask=inside, other=0.0)
    weights = tl.where(tops > float("-inf"), sums * tl.exp(tops - best), 0.0)
    total = best + tl.log(tl.sum(weights, 0))
    given = tl.load(logits + tl.load(ids_ptr + row)).to(tl.float32)
    tl.store(chosen_ptr + row, given - total)
    tl.store(rank_ptr + row, 1 + tl.sum(tl.load(ranks_ptr + at, mask=inside, other=0), 0))

    wanted = tl.minimum(num_logprobs, max_top)
    if wanted > 0:
        # No logit is changed or scaled here.
        line = (logits, top_ptr, list_ptr, list_ptr, False, False)
        num_spans = num_tiles * SPANS
        found = found_ptr + row * CAPACITY
        count = CAPACITY + 1
        if wanted <= MAX_FEW:
            count = collect(
                line,
                0.0,
                1.0,
                wanted,
                vocab_size,
                peaks_ptr + row * num_spans,
                num_spans,
                list_ptr + row * num_spans,
                found,
                TILES * SPANS,
                SPAN,
            )
        top_ids = top_ids_ptr + row * max_top
        top = top_ptr + row * max_top
        if count <= SHORT:
            _store_sorted(found, count, wanted, total, top_ids, top, SHORT)
        elif count <= CAPACITY:
            _store_sorted(found, count, wanted, total, top_ids, top, CAPACITY)
        else:
            _store_one_by_one(logits, vocab_size, wanted, total, top_ids, top)


@triton.jit
def _store_sorted(found_ptr, count, wanted, total, top_ids_ptr, top_ptr, SIZE: tl.constexpr):
    x, ids = unpack(load_sorted(found_ptr, count, SIZE))
    at = tl.arange(0, SIZE)
    stored = (at < count) & (at < wanted)
    tl.store(top_ids_ptr + at, ids.to(tl.int64), mask=stored)
    tl.store(top_ptr + at, x - total, mask=stored)


@triton.jit
def _store_one_by_one(logits_ptr, vocab_size, wanted, total, top_ids_ptr, top_ptr):
    """For very many, or very many equals: the best below the last one found, again and again."""
    last = tl.full([], 9223372036854775807, tl.int64)
    for i in range(wanted):
        packed = tl.full([BLOCK], LEAST, tl.int64)
        for start in range(0, vocab_size, BLOCK):
            column = start + tl.arange(0, BLOCK)
            valid = column < vocab_size
            x = tl.load(logits_ptr + column, mask=valid, other=float("-inf")).to(tl.float32)
            found = pack(x, column)
            packed = tl.maximum(packed, tl.where(valid & (found < last), found, LEAST))
        last = tl.max(packed, 0)
        value, token = unpack(last)
        tl.store(top_ids_ptr + i, token.to(tl.int64))
        tl.store(top_ptr + i, value - total)


def logprobs(
    logits: Tensor, token_ids: Tensor, slots: Tensor, tables: SamplingTables, max_top: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-softmax of raw `logits [S, V]` at the ids `[S] int64` and at the best, for rows whose slot asks for it.

    `slots [S] int64`; -1 is padding. Returns, of the given tokens, log-probabilities `[S] f32` and ranks `[S] int64`
    (1 + the number of strictly larger logits); of the best, ids `[S, max_top] int64` and log-probabilities
    `[S, max_top] f32`, the lowest id first among equals. Rows that do not ask, and places past what a row asks for,
    hold anything.
    """
    num_rows, vocab_size = logits.shape
    device = logits.device
    chosen = torch.empty(num_rows, dtype=torch.float32, device=device)
    rank = torch.empty(num_rows, dtype=torch.int64, device=device)
    top_ids = torch.empty((num_rows, max_top), dtype=torch.int64, device=device)
    top = torch.empty((num_rows, max_top), dtype=torch.float32, device=device)
    if not num_rows:
        return chosen, rank, top_ids, top
    tiling = Tiling.of(num_rows, vocab_size)
    tops, sums = torch.empty((2, num_rows, tiling.num_tiles), dtype=torch.float32, device=device)
    ranks = torch.empty((num_rows, tiling.num_tiles), dtype=torch.int32, device=device)
    peaks = torch.empty((num_rows, tiling.num_spans), dtype=torch.float32, device=device)
    spans = torch.empty((num_rows, tiling.num_spans), dtype=torch.int32, device=device)
    found = torch.empty((num_rows, CAPACITY.value), dtype=torch.int64, device=device)
    arguments = table_arguments(tables)
    launch(
        _measure_kernel,
        (tiling.num_tiles, num_rows),
        logits,
        logits.stride(0),
        slots,
        token_ids,
        arguments,
        vocab_size,
        tops,
        sums,
        ranks,
        peaks,
        TILE=tiling.tile,
        SPAN=tiling.span,
        num_warps=tiling.num_warps,
    )
    launch(
        _logprobs_kernel,
        (num_rows,),
        logits,
        logits.stride(0),
        slots,
        token_ids,
        arguments,
        vocab_size,
        tiling.num_tiles,
        tops,
        sums,
        ranks,
        peaks,
        spans,
        found,
        chosen,
        rank,
        top_ids,
        top,
        max_top,
        SPANS=tiling.tile // tiling.span,
        SPAN=tiling.span,
        TILES=triton.next_power_of_2(tiling.num_tiles),
        num_warps=8,
        maxnreg=128,
    )
    return chosen, rank, top_ids, top
