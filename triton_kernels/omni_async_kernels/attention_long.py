"""Attention of rows of many tokens: tiles of their tokens, each over all of the context that it sees."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from omni_async_kernels.attention_attend import Scoring, attend, first_blocks
from omni_async_kernels.attention_tiles import NUM_SMS, long_tile, padded_head
from omni_async_kernels.attention_work import TILE_FIELDS, AttentionWork
from omni_async_kernels.launch import launch_overlapping, wait_for_predecessor


@triton.jit
def _long_rows_kernel(
    q_ptr,
    out_ptr,
    k_ptr,
    v_ptr,
    tables_ptr,
    table_stride,
    tiles_ptr,
    counts_ptr,
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
    TILE_FIELDS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Tiles of one row's queries: `BLOCK_M / group` tokens, with all query heads that share one key head."""
    wait_for_predecessor(OVERLAP)
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    m_at = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    num_items = tl.load(counts_ptr + 1) * NUM_KV_HEADS
    for dealt in range(0, num_items, num_programs):
        # Heavy items come first; dealt out to and fro, every program gets as much.
        item = dealt + tl.where(dealt // num_programs % 2 == 0, program, num_programs - 1 - program)
        if item < num_items:
            kv_head = item % NUM_KV_HEADS
            line_ptr = tiles_ptr + item // NUM_KV_HEADS * TILE_FIELDS
            slot = tl.load(line_ptr).to(tl.int64)
            first = tl.load(line_ptr + 1).to(tl.int64)
            length = tl.load(line_ptr + 2)
            context = tl.load(line_ptr + 3)
            tile = tl.load(line_ptr + 4)
            token = tile * TOKENS + m_at // GROUP
            exists = (token < length) & (m_at < TOKENS * GROUP)
            present = exists[:, None] & (d < HEAD_SIZE)[None, :]
            head = kv_head * GROUP + m_at % GROUP
            at = ((first + token) * NUM_HEADS + head)[:, None] * HEAD_SIZE + d[None, :]
            q = tl.load(q_ptr + at, mask=present, other=0.0)
            # What the first and the last query of the tile see.
            first_end = context - length + tile * TOKENS + 1
            last_end = tl.minimum(context, first_end + TOKENS - 1)
            start = tl.maximum(first_end - WINDOW, 0) if WINDOW > 0 else 0
            table_ptr = tables_ptr + slot * table_stride
            block = first_blocks(table_ptr, start, last_end, BLOCK_SIZE, BLOCK_N)
            result, _ = attend(
                q, block, start, last_end, last_end - WINDOW if WINDOW > 0 else 0, first_end, context - length + token,
                table_ptr, k_ptr + kv_head * HEAD_SIZE, v_ptr + kv_head * HEAD_SIZE, factor, cap,
                NUM_KV_HEADS, HEAD_SIZE, BLOCK_SIZE, BLOCK_M, BLOCK_D, BLOCK_N, NUM_STAGES, WINDOW, CAPPED, PRECISION,
            )  # fmt: skip
            tl.store(out_ptr + at, (result * v_scale).to(out_ptr.dtype.element_ty), mask=present)


def attend_long_rows(
    q: Tensor,
    out: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    work: AttentionWork,
    scoring: Scoring,
    window: int | None,
    v_scale: float,
) -> None:
    """Write the results `[T, Hq, D]` of the rows of more than `work.short_tokens` tokens to `out`."""
    num_heads, head_size = q.shape[1:]
    block_size, num_kv_heads = k_cache.shape[1:3]
    tile = long_tile(head_size, q.dtype)
    launch_overlapping(
        _long_rows_kernel,
        (min(len(work.tiles) * num_kv_heads, NUM_SMS * tile.programs_per_sm),),
        q,
        out,
        k_cache,
        v_cache,
        block_tables,
        block_tables.stride(0),
        work.tiles,
        work.counts,
        scoring.factor,
        scoring.cap,
        v_scale,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_SIZE=head_size,
        BLOCK_SIZE=block_size,
        BLOCK_D=padded_head(head_size),
        BLOCK_M=tile.queries,
        BLOCK_N=tile.keys,
        NUM_STAGES=tile.num_stages,
        WINDOW=window or 0,
        CAPPED=scoring.cap > 0,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        TILE_FIELDS=TILE_FIELDS,
        num_warps=tile.num_warps,
    )
