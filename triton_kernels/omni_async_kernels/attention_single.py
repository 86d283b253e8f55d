"""Attention of rows of one token each, straight from the product that made their queries, keys and values.

The program with the end of a row's context makes the new key and value, writes them to the cache and counts them in
before it looks at older positions; no program reads them from the cache.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from omni_async_kernels import attention_tiles
from omni_async_kernels.attention_attend import Scoring, attend_further, exponents, first_blocks
from omni_async_kernels.attention_new import column_rotation, column_weights, load_turned
from omni_async_kernels.attention_split import deliver, prefetch_cached, read_line
from omni_async_kernels.attention_tiles import NUM_SMS, padded_head, single_tile
from omni_async_kernels.attention_work import SPLIT_FIELDS, AttentionWork
from omni_async_kernels.launch import launch_overlapping, wait_for_predecessor
from omni_async_kernels.saturate import saturate


@triton.jit(do_not_specialize=["num_lines", "num_tokens"])
def _single_rows_kernel(
    qkv_ptr,
    positions_ptr,
    axes_ptr,
    cos_ptr,
    sin_ptr,
    query_norm_ptr,
    key_norm_ptr,
    eps,
    mapping_ptr,
    out_ptr,
    k_ptr,
    v_ptr,
    tables_ptr,
    table_stride,
    splits_ptr,
    num_lines,
    num_tokens,
    arrived_ptr,
    parts_ptr,
    lse_ptr,
    factor,
    cap,
    v_scale,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_REST: tl.constexpr,
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
    """Splits of contexts, each for all query heads that share one key head."""
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    ALL_HEADS: tl.constexpr = NUM_HEADS + 2 * NUM_KV_HEADS
    m_at = tl.arange(0, BLOCK_M)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    num_programs = tl.num_programs(0)
    item = tl.program_id(0)
    slot, first, length, context, start, end, split, num_splits, part = read_line(
        splits_ptr, item, num_lines, NUM_KV_HEADS, SPLIT_FIELDS, WINDOW
    )
    table_ptr = tables_ptr + slot * table_stride
    block = first_blocks(table_ptr, start, end, BLOCK_SIZE, BLOCK_N)
    if OVERLAP:
        kv_offset = item % NUM_KV_HEADS * HEAD_SIZE
        prefetch_cached(
            table_ptr, k_ptr + kv_offset, v_ptr + kv_offset, start, tl.minimum(end, context - 1),
            NUM_KV_HEADS, HEAD_SIZE, BLOCK_SIZE, BLOCK_D, PREFETCHED,
        )  # fmt: skip
    while length > 0:
        # The next item's line, for when this one is done.
        coming = read_line(splits_ptr, item + num_programs, num_lines, NUM_KV_HEADS, SPLIT_FIELDS, WINDOW)
        kv_head = item % NUM_KV_HEADS
        newest = end == context
        cos, sin = column_rotation(
            positions_ptr, axes_ptr, cos_ptr, sin_ptr, first, num_tokens, d < HEAD_SIZE, d, HALF
        )  # fmt: skip
        query_weight, query_partner = column_weights(query_norm_ptr, d, HEAD_SIZE, HALF, NORM)
        key_weight, key_partner = column_weights(key_norm_ptr, d, HEAD_SIZE, HALF, NORM)
        place = tl.load(mapping_ptr + first, cache_modifier=".cg")
        token_ptr = qkv_ptr + first * (ALL_HEADS * HEAD_SIZE)
        # The key once for each query: what threads hold of both then fits together.
        query_ptr = token_ptr + (kv_head * GROUP + m_at) * HEAD_SIZE
        key_ptr = token_ptr + (NUM_HEADS + kv_head + 0 * m_at) * HEAD_SIZE
        value_ptr = token_ptr + (NUM_HEADS + NUM_KV_HEADS + kv_head) * HEAD_SIZE
        # In the loop, where it waits but once, so that all that the loop prepares comes before it.
        wait_for_predecessor(OVERLAP)
        value = tl.load(value_ptr + d, mask=newest & (d < HEAD_SIZE), other=0.0)
        key = load_turned(
            key_ptr, newest, d, cos, sin, key_weight, key_partner, eps,
            HEAD_SIZE, HALF, NORM, BLOCK_D, BLOCK_REST,
        )  # fmt: skip
        q = load_turned(
            query_ptr, m_at < GROUP, d, cos, sin, query_weight, query_partner, eps,
            HEAD_SIZE, HALF, NORM, BLOCK_D, BLOCK_REST,
        )  # fmt: skip

        # Used as the cache holds them.
        key = saturate(key, k_ptr.dtype.element_ty)
        value = saturate(value, v_ptr.dtype.element_ty)
        written = newest & (place >= 0) & (d < HEAD_SIZE)
        at = (place * NUM_KV_HEADS + kv_head) * HEAD_SIZE + d
        tl.store(k_ptr + at + 0 * m_at, key, mask=written & (m_at == 0))
        tl.store(v_ptr + at, value, mask=written)
        products = tl.sum(q.to(tl.float32) * key.to(q.dtype).to(tl.float32), axis=1)
        m = tl.where(newest, exponents(products, factor, cap, CAPPED), float("-inf"))
        total = tl.where(newest, tl.full([BLOCK_M], 1.0, tl.float32), 0.0)
        acc = tl.broadcast_to(value.to(q.dtype).to(tl.float32), [BLOCK_M, BLOCK_D])

        # A row of one token sees all that is cached and within the window, where its line of the list begins.
        cached_end = tl.minimum(end, context - 1)
        result, lse = attend_further(
            q, m, total, acc, block, start, cached_end, 0, cached_end,
            tl.full([BLOCK_M], 0, tl.int32) + context, tables_ptr + slot * table_stride,
            k_ptr + kv_head * HEAD_SIZE, v_ptr + kv_head * HEAD_SIZE, factor, cap,
            NUM_KV_HEADS, HEAD_SIZE, BLOCK_SIZE, BLOCK_D, BLOCK_N, NUM_STAGES, 0, CAPPED, PRECISION,
        )  # fmt: skip
        table_ptr = tables_ptr + coming[0] * table_stride
        block = first_blocks(table_ptr, coming[4], coming[5], BLOCK_SIZE, BLOCK_N)
        deliver(
            result, lse, out_ptr, parts_ptr, lse_ptr, arrived_ptr, item, first, length, split, num_splits, part,
            v_scale,
            NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE, BLOCK_M, BLOCK_D, GROUP_ROWS, JOINED_AT_ONCE,
        )  # fmt: skip
        item += num_programs
        slot, first, length, context, start, end, split, num_splits, part = coming
    # Programs without work too.
    wait_for_predecessor(OVERLAP)


def attend_new_tokens(
    qkv: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    axes: Tensor | None,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    eps: float,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    slot_mapping: Tensor,
    num_heads: int,
    scale: float,
    work: AttentionWork,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    work_is_older: bool = False,
) -> Tensor:
    """`rotate_and_cache` and `paged_attention` in one launch, for steps whose rows have one token each.

    `work`: of `plan_attention` with `single`. The new key and value are used as the cache holds them, also where the
    slot is -1. Neither positions nor slots may be of the kernel launched right before. Returns `[T, Hq, D]`.

    Raises:
        ValueError: the work was planned for longer rows or a smaller window; positions of several axes without `axes`.
    """
    if positions.dim() == 2 and axes is None:
        raise ValueError("positions of several axes need axes")
    if work.short_tokens != 1:
        raise ValueError(f"work planned for rows of up to {work.short_tokens} tokens, not of one")
    work.check_window(window)
    block_size, num_kv_heads, head_size = k_cache.shape[1:]
    group, half = num_heads // num_kv_heads, cos.shape[1]
    out = qkv.new_empty((len(qkv), num_heads, head_size))
    if not len(work.splits):
        return out
    tile = single_tile(len(qkv), num_kv_heads, group, head_size, qkv.dtype, k_cache.dtype)
    block_d, group_rows = padded_head(head_size), triton.next_power_of_2(group)
    rest = head_size - 2 * half
    scoring = Scoring.of(scale * k_scale, soft_cap)
    launch_overlapping(
        _single_rows_kernel,
        (min(len(work.splits) * num_kv_heads, NUM_SMS * tile.programs_per_sm),),
        qkv,
        positions,
        axes if positions.dim() == 2 else None,
        cos,
        sin,
        query_norm if query_norm is not None else qkv,
        key_norm if key_norm is not None else qkv,
        eps,
        slot_mapping,
        out,
        k_cache,
        v_cache,
        block_tables,
        block_tables.stride(0),
        work.splits,
        len(work.splits),
        len(qkv),
        work.arrived,
        work.parts,
        work.part_lse,
        scoring.factor,
        scoring.cap,
        v_scale,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_SIZE=head_size,
        HALF=half,
        NORM=query_norm is not None,
        BLOCK_SIZE=block_size,
        BLOCK_D=block_d,
        BLOCK_REST=triton.next_power_of_2(rest) if rest else 0,
        BLOCK_M=tile.queries,
        BLOCK_N=tile.keys,
        NUM_STAGES=tile.num_stages,
        WINDOW=window or 0,
        CAPPED=scoring.cap > 0,
        PRECISION="ieee" if qkv.dtype == torch.float32 else "tf32",
        SPLIT_FIELDS=SPLIT_FIELDS,
        PREFETCHED=attention_tiles.PREFETCHED,
        GROUP_ROWS=group_rows,
        JOINED_AT_ONCE=max(attention_tiles.JOINED_VALUES // (group_rows * block_d), 1),
        allowed=work_is_older,
        num_warps=tile.num_warps,
        maxnreg=tile.registers,
    )
    return out
