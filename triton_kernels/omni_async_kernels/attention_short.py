"""Attention of rows of few tokens: splits of their contexts, joined by the program that finishes a row's last one."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from omni_async_kernels import attention_tiles
from omni_async_kernels.attention_attend import Scoring, attend
from omni_async_kernels.attention_tiles import NUM_SMS, padded_head, short_tile
from omni_async_kernels.attention_work import SPLIT_FIELDS, AttentionWork
from omni_async_kernels.launch import launch


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


@triton.jit
def _short_rows_kernel(
    q_ptr,
    out_ptr,
    k_ptr,
    v_ptr,
    tables_ptr,
    table_stride,
    splits_ptr,
    counts_ptr,
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
    PDL: tl.constexpr,
):
    """Splits of contexts, each for all tokens of its row and all query heads that share one key head."""
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    m_at = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    num_items = tl.load(counts_ptr) * NUM_KV_HEADS
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        # Heads run fastest: those of a position lie together in the cache.
        line = item // NUM_KV_HEADS
        kv_head = item % NUM_KV_HEADS
        line_ptr = splits_ptr + line * SPLIT_FIELDS
        slot = tl.load(line_ptr).to(tl.int64)
        first = tl.load(line_ptr + 1).to(tl.int64)
        length = tl.load(line_ptr + 2)
        context = tl.load(line_ptr + 3)
        start = tl.load(line_ptr + 4)
        end = tl.load(line_ptr + 5)
        split = tl.load(line_ptr + 6)
        num_splits = tl.load(line_ptr + 7)
        part = tl.load(line_ptr + 8)
        if PDL:
            # From here on, what the kernel before wrote is read.
            gdc_wait()
            gdc_launch_dependents()
        if WINDOW > 0:
            start = tl.maximum(start, context - length - WINDOW + 1)
        token = m_at // GROUP
        head = kv_head * GROUP + m_at % GROUP
        exists = token < length
        present = exists[:, None] & (d < HEAD_SIZE)[None, :]
        at = ((first + token) * NUM_HEADS + head)[:, None] * HEAD_SIZE + d[None, :]
        q = tl.load(q_ptr + at, mask=present, other=0.0)
        first_last = context - length
        result, lse = attend(
            q, start, end, context - WINDOW if WINDOW > 0 else 0, first_last + 1, first_last + token,
            tables_ptr + slot * table_stride, k_ptr + kv_head * HEAD_SIZE, v_ptr + kv_head * HEAD_SIZE, factor, cap,
            NUM_KV_HEADS, HEAD_SIZE, BLOCK_SIZE, BLOCK_M, BLOCK_D, BLOCK_N, NUM_STAGES, WINDOW, CAPPED, PRECISION,
        )  # fmt: skip
        if num_splits == 1:
            tl.store(out_ptr + at, (result * v_scale).to(out_ptr.dtype.element_ty), mask=present)
        else:
            part_line = (part + split * length + token).to(tl.int64) * NUM_HEADS + head
            tl.store(lse_ptr + part_line, lse, mask=exists)
            tl.store(parts_ptr + part_line[:, None] * HEAD_SIZE + d[None, :], result, mask=present)
            # All threads' results before the count that announces them.
            tl.debug_barrier()
            arrived = arrived_ptr + (line - split) * NUM_KV_HEADS + kv_head
            if tl.atomic_add(arrived, 1, sem="acq_rel") == num_splits - 1:
                _join(
                    out_ptr, parts_ptr, lse_ptr, part, first, length, num_splits, kv_head, v_scale,
                    NUM_HEADS, GROUP, GROUP_ROWS, HEAD_SIZE, BLOCK_D, JOINED_AT_ONCE,
                )  # fmt: skip
                tl.store(arrived, 0)
    if PDL:
        # Programs without work too: the end of this kernel tells that the one before has ended.
        gdc_wait()


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
) -> None:
    """Write the results `[T, Hq, D]` of the rows of at most `work.short_tokens` tokens to `out`."""
    num_heads, head_size = q.shape[1:]
    block_size, num_kv_heads = k_cache.shape[1:3]
    group = num_heads // num_kv_heads
    tile = short_tile(group, work.short_tokens, head_size, q.dtype, k_cache.dtype)
    block_d, group_rows = padded_head(head_size), triton.next_power_of_2(group)
    launch(
        _short_rows_kernel,
        (min(len(work.splits) * num_kv_heads, NUM_SMS * tile.programs_per_sm),),
        q,
        out,
        k_cache,
        v_cache,
        block_tables,
        block_tables.stride(0),
        work.splits,
        work.counts,
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
        PDL=attention_tiles.PDL,
        num_warps=tile.num_warps,
        launch_pdl=attention_tiles.PDL,
    )
