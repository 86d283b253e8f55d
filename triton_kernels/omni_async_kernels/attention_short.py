"""Attention of rows of few tokens: splits of their contexts, joined by the program that finishes a row's last one."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from omni_async_kernels import attention_tiles
from omni_async_kernels.attention_attend import Scoring, attend, first_blocks
from omni_async_kernels.attention_tiles import NUM_SMS, padded_head, short_tile
from omni_async_kernels.attention_work import SPLIT_FIELDS, AttentionWork
from omni_async_kernels.launch import launch_overlapping, prefetch, wait_for_predecessor


@triton.jit
def _join(
    out_ptr,
    parts_ptr,
    lse_ptr,
    part,
    first,
    length,
    num_splits,
    kv_head,
    v_scale,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Add up the results of a row's splits for the query heads that share a key head."""
    g = tl.arange(0, GROUP_ROWS)
    d = tl.arange(0, BLOCK_D)
    head = kv_head * GROUP + g
    inside = (g < GROUP)[:, None] & (d < HEAD_SIZE)[None, :]
    for token in range(length):
        m = tl.full([GROUP_ROWS], float("-inf"), tl.float32)
        total = tl.zeros([GROUP_ROWS], tl.float32)
        acc = tl.zeros([GROUP_ROWS, BLOCK_D], tl.float32)
        for done in range(0, num_splits, AT_ONCE):
            split = done + tl.arange(0, AT_ONCE)
            exists = split < num_splits
            line = (part + split * length + token).to(tl.int64)[:, None] * NUM_HEADS + head[None, :]
            # Other programs wrote these: not from this multiprocessor's own cache.
            lse = tl.load(
                lse_ptr + line,
                mask=exists[:, None] & (g < GROUP)[None, :],
                other=float("-inf"),
                cache_modifier=".cg",
            )
            values = tl.load(
                parts_ptr + line[:, :, None] * HEAD_SIZE + d[None, None, :],
                mask=exists[:, None, None] & inside[None, :, :],
                other=0.0,
                cache_modifier=".cg",
            )
            new_m = tl.maximum(m, tl.max(lse, axis=0))
            base = tl.where(new_m == float("-inf"), 0.0, new_m)
            weight = tl.exp2(lse - base[None, :])
            fade = tl.exp2(m - base)
            total = total * fade + tl.sum(weight, axis=0)
            acc = acc * fade[:, None] + tl.sum(values * weight[:, :, None], axis=0)
            m = new_m
        at = ((first + token) * NUM_HEADS + head)[:, None] * HEAD_SIZE + d[None, :]
        tl.store(out_ptr + at, (acc / total[:, None] * v_scale).to(out_ptr.dtype.element_ty), mask=inside)


LINE = tl.constexpr(128)
"""Bytes of a line of the L2 cache."""


@triton.jit
def _read_line(
    splits_ptr, item, num_lines, NUM_KV_HEADS: tl.constexpr, SPLIT_FIELDS: tl.constexpr, WINDOW: tl.constexpr
):
    """An item's line of the list, past the L1 cache; behind the last, one without tokens."""
    # Heads run fastest: those of a position lie together in the cache.
    line = item // NUM_KV_HEADS
    exists = line < num_lines
    line_ptr = splits_ptr + line * SPLIT_FIELDS
    slot = tl.load(line_ptr, mask=exists, other=0, cache_modifier=".cg").to(tl.int64)
    first = tl.load(line_ptr + 1, mask=exists, other=0, cache_modifier=".cg").to(tl.int64)
    length = tl.load(line_ptr + 2, mask=exists, other=0, cache_modifier=".cg")
    context = tl.load(line_ptr + 3, mask=exists, other=0, cache_modifier=".cg")
    start = tl.load(line_ptr + 4, mask=exists, other=0, cache_modifier=".cg")
    end = tl.load(line_ptr + 5, mask=exists, other=0, cache_modifier=".cg")
    split = tl.load(line_ptr + 6, mask=exists, other=0, cache_modifier=".cg")
    num_splits = tl.load(line_ptr + 7, mask=exists, other=0, cache_modifier=".cg")
    part = tl.load(line_ptr + 8, mask=exists, other=0, cache_modifier=".cg")
    if WINDOW > 0:
        start = tl.maximum(start, context - length - WINDOW + 1)
    return slot, first, length, context, start, end, split, num_splits, part


@triton.jit
def _prefetch_tiles(table_ptr, k_ptr, v_ptr, start, end, NUM_KV_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr,
                    BLOCK_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
                    NUM_STAGES: tl.constexpr):  # fmt: skip
    """Ask for the first tiles of keys and values. This step's may still be on their way: nothing is read here."""
    PER_LINE: tl.constexpr = LINE // (k_ptr.dtype.element_ty.primitive_bitwidth // 8)
    d = tl.minimum(tl.arange(0, (BLOCK_D + PER_LINE - 1) // PER_LINE) * PER_LINE, HEAD_SIZE - 1)
    for tile in tl.static_range(NUM_STAGES):
        tile_start = start + tile * BLOCK_N
        if tile_start < end:
            block = first_blocks(table_ptr, tile_start, end, BLOCK_SIZE, BLOCK_N).to(tl.int64)
            # Positions behind the last ask for lines of block 0.
            position = tile_start + tl.arange(0, BLOCK_N)
            entry = (block * BLOCK_SIZE + position % BLOCK_SIZE) * (NUM_KV_HEADS * HEAD_SIZE)
            at = entry[:, None] + d[None, :]
            prefetch(k_ptr + at)
            prefetch(v_ptr + at)


@triton.jit(do_not_specialize=["num_lines"])
def _short_rows_kernel(
    q_ptr,
    out_ptr,
    k_ptr,
    v_ptr,
    tables_ptr,
    table_stride,
    splits_ptr,
    num_lines,
    arrived_ptr,
    parts_ptr,
    lse_ptr,
    factor,
    cap,
    v_scale,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
    SPLIT_FIELDS: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    JOINED_AT_ONCE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Splits of contexts, each for all tokens of its row and all query heads that share one key head."""
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    m_at = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    num_programs = tl.num_programs(0)
    item = tl.program_id(0)
    slot, first, length, context, start, end, split, num_splits, part = _read_line(
        splits_ptr, item, num_lines, NUM_KV_HEADS, SPLIT_FIELDS, WINDOW
    )
    block = first_blocks(tables_ptr + slot * table_stride, start, end, BLOCK_SIZE, BLOCK_N)
    if OVERLAP:
        kv_offset = item % NUM_KV_HEADS * HEAD_SIZE
        _prefetch_tiles(
            tables_ptr + slot * table_stride, k_ptr + kv_offset, v_ptr + kv_offset, start, end,
            NUM_KV_HEADS, HEAD_SIZE, BLOCK_SIZE, BLOCK_D, BLOCK_N, NUM_STAGES,
        )  # fmt: skip
    while length > 0:
        # The next item's line, for when this one is done.
        coming = _read_line(splits_ptr, item + num_programs, num_lines, NUM_KV_HEADS, SPLIT_FIELDS, WINDOW)
        kv_head = item % NUM_KV_HEADS
        token = m_at // GROUP
        head = kv_head * GROUP + m_at % GROUP
        exists = token < length
        present = exists[:, None] & (d < HEAD_SIZE)[None, :]
        at = ((first + token) * NUM_HEADS + head)[:, None] * HEAD_SIZE + d[None, :]
        # In the loop, where it waits but once, so that all that the loop prepares comes before it.
        wait_for_predecessor(OVERLAP)
        q = tl.load(q_ptr + at, mask=present, other=0.0)
        first_last = context - length
        result, lse = attend(
            q, block, start, end, context - WINDOW if WINDOW > 0 else 0, first_last + 1, first_last + token,
            tables_ptr + slot * table_stride, k_ptr + kv_head * HEAD_SIZE, v_ptr + kv_head * HEAD_SIZE, factor, cap,
            NUM_KV_HEADS, HEAD_SIZE, BLOCK_SIZE, BLOCK_M, BLOCK_D, BLOCK_N, NUM_STAGES, WINDOW, CAPPED, PRECISION,
        )  # fmt: skip
        block = first_blocks(tables_ptr + coming[0] * table_stride, coming[4], coming[5], BLOCK_SIZE, BLOCK_N)
        if num_splits == 1:
            tl.store(out_ptr + at, (result * v_scale).to(out_ptr.dtype.element_ty), mask=present)
        else:
            part_line = (part + split * length + token).to(tl.int64) * NUM_HEADS + head
            tl.store(lse_ptr + part_line, lse, mask=exists)
            tl.store(parts_ptr + part_line[:, None] * HEAD_SIZE + d[None, :], result, mask=present)
            # All threads' results before the count that announces them.
            tl.debug_barrier()
            arrived = arrived_ptr + (item // NUM_KV_HEADS - split) * NUM_KV_HEADS + kv_head
            if tl.atomic_add(arrived, 1, sem="acq_rel") == num_splits - 1:
                _join(
                    out_ptr, parts_ptr, lse_ptr, part, first, length, num_splits, kv_head, v_scale,
                    NUM_HEADS, GROUP, GROUP_ROWS, HEAD_SIZE, BLOCK_D, JOINED_AT_ONCE,
                )  # fmt: skip
                tl.store(arrived, 0)
        item += num_programs
        slot, first, length, context, start, end, split, num_splits, part = coming
    # Programs without work too.
    wait_for_predecessor(OVERLAP)


def attend_short_rows(
    q: Tensor,
    out: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    work: AttentionWork,
    scoring: Scoring,
    window: int | None,
    v_scale: float,
    *,
    work_is_older: bool,
) -> None:
    """Write the results `[T, Hq, D]` of the rows of at most `work.short_tokens` tokens to `out`.

    `work_is_older`: the kernel launched right before made neither the work nor the block tables.
    """
    num_heads, head_size = q.shape[1:]
    block_size, num_kv_heads = k_cache.shape[1:3]
    group = num_heads // num_kv_heads
    tile = short_tile(group, work.short_tokens, head_size, q.dtype, k_cache.dtype)
    block_d, group_rows = padded_head(head_size), triton.next_power_of_2(group)
    launch_overlapping(
        _short_rows_kernel,
        (min(len(work.splits) * num_kv_heads, NUM_SMS * tile.programs_per_sm),),
        q,
        out,
        k_cache,
        v_cache,
        block_tables,
        block_tables.stride(0),
        work.splits,
        len(work.splits),
        work.arrived,
        work.parts,
        work.part_lse,
        scoring.factor,
        scoring.cap,
        v_scale,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_SIZE=head_size,
        BLOCK_SIZE=block_size,
        BLOCK_D=block_d,
        BLOCK_M=tile.queries,
        BLOCK_N=tile.keys,
        NUM_STAGES=tile.num_stages,
        WINDOW=window or 0,
        CAPPED=scoring.cap > 0,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        SPLIT_FIELDS=SPLIT_FIELDS,
        GROUP_ROWS=group_rows,
        JOINED_AT_ONCE=max(attention_tiles.JOINED_VALUES // (group_rows * block_d), 1),
        allowed=work_is_older,
        num_warps=tile.num_warps,
    )
