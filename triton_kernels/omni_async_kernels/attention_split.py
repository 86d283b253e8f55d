"""What the kernels of rows of few tokens share: a line of the list of work, and what becomes of a split's result."""

import triton
import triton.language as tl

from omni_async_kernels.attention_attend import first_blocks
from omni_async_kernels.launch import prefetch

LINE = tl.constexpr(128)
"""Bytes of a line of the L2 cache."""


@triton.jit
def read_line(
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
def prefetch_cached(table_ptr, k_ptr, v_ptr, start, end, NUM_KV_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr,
                    BLOCK_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, POSITIONS: tl.constexpr):  # fmt: skip
    """Ask for the first keys and values. This step's may still be on their way: nothing is read here."""
    PER_LINE: tl.constexpr = LINE // (k_ptr.dtype.element_ty.primitive_bitwidth // 8)
    d = tl.minimum(tl.arange(0, (BLOCK_D + PER_LINE - 1) // PER_LINE) * PER_LINE, HEAD_SIZE - 1)
    # All at once: one wait for the table. Positions behind the last ask for lines of block 0.
    block = first_blocks(table_ptr, start, end, BLOCK_SIZE, POSITIONS).to(tl.int64)
    position = start + tl.arange(0, POSITIONS)
    entry = (block * BLOCK_SIZE + position % BLOCK_SIZE) * (NUM_KV_HEADS * HEAD_SIZE)
    at = entry[:, None] + d[None, :]
    prefetch(k_ptr + at)
    prefetch(v_ptr + at)


@triton.jit
def deliver(
    result,
    lse,
    out_ptr,
    parts_ptr,
    lse_ptr,
    arrived_ptr,
    item,
    first,
    length,
    split,
    num_splits,
    part,
    v_scale,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    JOINED_AT_ONCE: tl.constexpr,
):
    """Write a split's results `[M, D]`: to the output if it is the row's only one, else for the last to join them."""
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    m_at = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    kv_head = item % NUM_KV_HEADS
    token = m_at // GROUP
    head = kv_head * GROUP + m_at % GROUP
    exists = token < length
    present = exists[:, None] & (d < HEAD_SIZE)[None, :]
    if num_splits == 1:
        at = ((first + token) * NUM_HEADS + head)[:, None] * HEAD_SIZE + d[None, :]
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
