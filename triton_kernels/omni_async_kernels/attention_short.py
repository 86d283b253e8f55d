"""Attention of rows of few tokens: splits of their contexts, joined by the program that finishes a row's last one."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from omni_async_kernels import attention_tiles
from omni_async_kernels.attention_attend import Scoring, attend, first_blocks
from omni_async_kernels.attention_split import deliver, prefetch_cached, read_line
from omni_async_kernels.attention_tiles import NUM_SMS, padded_head, short_tile
from omni_async_kernels.attention_work import SPLIT_FIELDS, AttentionWork
from omni_async_kernels.launch import launch_overlapping, wait_for_predecessor


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
    PREFETCHED: tl.constexpr,
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
    slot, first, length, context, start, end, split, num_splits, part = read_line(
        splits_ptr, item, num_lines, NUM_KV_HEADS, SPLIT_FIELDS, WINDOW
    )
    block = first_blocks(tables_ptr + slot * table_stride, start, end, BLOCK_SIZE, BLOCK_N)
    if OVERLAP:
        kv_offset = item % NUM_KV_HEADS * HEAD_SIZE
        prefetch_cached(
            tables_ptr + slot * table_stride, k_ptr + kv_offset, v_ptr + kv_offset, start, end,
            NUM_KV_HEADS, HEAD_SIZE, BLOCK_SIZE, BLOCK_D, PREFETCHED,
        )  # fmt: skip
    while length > 0:
        # The next item's line, for when this one is done.
        coming = read_line(splits_ptr, item + num_programs, num_lines, NUM_KV_HEADS, SPLIT_FIELDS, WINDOW)
        kv_head = item % NUM_KV_HEADS
        token = m_at // GROUP
        head = kv_head * GROUP + m_at % GROUP
        present = (token < length)[:, None] & (d < HEAD_SIZE)[None, :]
        at = ((first + token) * NUM_HEADS + head)[:, None] * HEAD_SIZE + d[None, :]
        # In the loop, where it waits but once, so that all that the loop prepares comes before it.
        wait_for_predecessor(OVERLAP)
        q = tl.load(q_ptr + at, mask=present, other=0.0)
        first_last = context - length
        result, lse = attend(
            q, block, start, end, context - WINDOW if WINDOW > 0 else 0, tl.minimum(first_last + 1, end),
            first_last + token, tables_ptr + slot * table_stride, k_ptr + kv_head * HEAD_SIZE,
            v_ptr + kv_head * HEAD_SIZE, factor, cap,
            NUM_KV_HEADS, HEAD_SIZE, BLOCK_SIZE, BLOCK_M, BLOCK_D, BLOCK_N, NUM_STAGES, WINDOW, CAPPED, PRECISION,
        )  # fmt: skip
        block = first_blocks(tables_ptr + coming[0] * table_stride, coming[4], coming[5], BLOCK_SIZE, BLOCK_N)
        deliver(
            result, lse, out_ptr, parts_ptr, lse_ptr, arrived_ptr, item, first, length, split, num_splits, part,
            v_scale,
            NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE, BLOCK_M, BLOCK_D, GROUP_ROWS, JOINED_AT_ONCE,
        )  # fmt: skip
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
        PREFETCHED=triton.next_power_of_2(tile.keys * tile.num_stages),
        GROUP_ROWS=group_rows,
        JOINED_AT_ONCE=max(attention_tiles.JOINED_VALUES // (group_rows * block_d), 1),
        allowed=work_is_older,
        num_warps=tile.num_warps,
    )
