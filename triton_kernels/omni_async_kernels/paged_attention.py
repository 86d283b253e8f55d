"""Causal attention over the paged cache, for any mix of rows: one launch for rows of one token, one for longer rows.

Rows of one token are cut along their context into splits of a fixed size, so that a long context fills the chip; a
second launch combines them. A row's splits depend on its own length only, never on its neighbours'.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

SPLIT = 512
"""Positions of one split."""

SPLITS_AT_ONCE = 32
"""Splits that the combining kernel reads together."""

LOG2_E = 1.4426950408889634


@triton.jit
def _attend(
    q,
    m,
    total,
    acc,
    start,
    end,
    last,
    table_ptr,
    kv_head,
    k_ptr,
    v_ptr,
    scale,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The running maximum `m`, sum and weighted values of queries `[M, D]` after the positions `start .. end`.

    Query row i sees the positions up to `last[i]`; without `MASKED` it sees all of them, and their number is a multiple
    of `BLOCK_N`. Exponents are of base 2: `scale` holds log2(e).
    """
    d = tl.arange(0, BLOCK_D)
    for n in range(start, end, BLOCK_N):
        position = n + tl.arange(0, BLOCK_N)
        inside = position < end
        if MASKED:
            block = tl.load(table_ptr + position // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        else:
            block = tl.load(table_ptr + position // BLOCK_SIZE).to(tl.int64)
        entry = ((block * BLOCK_SIZE + position % BLOCK_SIZE) * NUM_KV_HEADS + kv_head) * HEAD_SIZE
        present = (d < HEAD_SIZE)[None, :]
        if MASKED:
            present = present & inside[:, None]
        k = tl.load(k_ptr + entry[:, None] + d[None, :], mask=present, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if MASKED:
            scores = tl.where(inside[None, :] & (position[None, :] <= last[:, None]), scores, float("-inf"))
        new_m = tl.maximum(m, tl.max(scores, axis=1))
        base = new_m
        if MASKED:
            # A row that has seen nothing yet: its maximum is -inf, and -inf - -inf is no number.
            base = tl.where(new_m == float("-inf"), 0.0, new_m)
        weight = tl.exp2(scores - base[:, None])
        fade = tl.exp2(m - base)
        total = total * fade + tl.sum(weight, axis=1)
        v = tl.load(v_ptr + entry[:, None] + d[None, :], mask=present, other=0.0)
        acc = tl.dot(weight.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
        m = new_m
    return m, total, acc


@triton.jit
def _long_rows_kernel(
    q_ptr,
    out_ptr,
    k_ptr,
    v_ptr,
    starts_ptr,
    contexts_ptr,
    tables_ptr,
    table_stride,
    scale,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A tile of one row's queries: `BLOCK_M / group` tokens, with all query heads that share one key head."""
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    row = tl.program_id(2)
    first = tl.load(starts_ptr + row)
    length = (tl.load(starts_ptr + row + 1) - first).to(tl.int32)
    # The last tiles of a row see most of its context, so they go first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    if (length == 1) | (tile * (BLOCK_M // GROUP) >= length):
        return
    kv_head = tl.program_id(1)
    m_at = tl.arange(0, BLOCK_M)
    token = tile * (BLOCK_M // GROUP) + m_at // GROUP
    d = tl.arange(0, BLOCK_D)
    exists = (token < length) & (m_at < (BLOCK_M // GROUP) * GROUP)
    present = exists[:, None] & (d < HEAD_SIZE)[None, :]
    at = (((first + token) * NUM_HEADS + kv_head * GROUP + m_at % GROUP) * HEAD_SIZE)[:, None] + d[None, :]
    q = tl.load(q_ptr + at, mask=present, other=0.0)
    context = tl.load(contexts_ptr + row).to(tl.int32)
    last = context - length + token
    end = tl.minimum(context, context - length + (tile + 1) * (BLOCK_M // GROUP))
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    table_ptr = tables_ptr + row.to(tl.int64) * table_stride
    # The positions that all queries of the tile see need no mask.
    seen_by_all = (context - length + tile * (BLOCK_M // GROUP) + 1) // BLOCK_N * BLOCK_N
    m, total, acc = _attend(
        q, m, total, acc, 0, seen_by_all, last, table_ptr, kv_head, k_ptr, v_ptr, scale,
        NUM_KV_HEADS, HEAD_SIZE, BLOCK_SIZE, BLOCK_D, BLOCK_N, PRECISION, False,
    )  # fmt: skip
    m, total, acc = _attend(
        q, m, total, acc, seen_by_all, end, last, table_ptr, kv_head, k_ptr, v_ptr, scale,
        NUM_KV_HEADS, HEAD_SIZE, BLOCK_SIZE, BLOCK_D, BLOCK_N, PRECISION, True,
    )  # fmt: skip
    tl.store(out_ptr + at, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=present)


@triton.jit
def _single_rows_kernel(
    q_ptr,
    out_ptr,
    part_ptr,
    part_m_ptr,
    part_total_ptr,
    k_ptr,
    v_ptr,
    starts_ptr,
    contexts_ptr,
    tables_ptr,
    table_stride,
    scale,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One split of the context of a row of one token, for all query heads that share one key head."""
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    row = tl.program_id(2)
    first = tl.load(starts_ptr + row)
    if tl.load(starts_ptr + row + 1) - first != 1:
        return
    context = tl.load(contexts_ptr + row).to(tl.int32)
    split = tl.program_id(0)
    if split * SPLIT >= context:
        return
    kv_head = tl.program_id(1)
    m_at = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    head = kv_head * GROUP + m_at
    exists = m_at < GROUP
    present = exists[:, None] & (d < HEAD_SIZE)[None, :]
    at = ((first * NUM_HEADS + head) * HEAD_SIZE)[:, None] + d[None, :]
    q = tl.load(q_ptr + at, mask=present, other=0.0)
    last = tl.zeros([BLOCK_M], tl.int32) + context - 1
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    table_ptr = tables_ptr + row.to(tl.int64) * table_stride
    end = tl.minimum(context, (split + 1) * SPLIT)
    whole = end // BLOCK_N * BLOCK_N
    m, total, acc = _attend(
        q, m, total, acc, split * SPLIT, whole, last, table_ptr, kv_head, k_ptr, v_ptr, scale,
        NUM_KV_HEADS, HEAD_SIZE, BLOCK_SIZE, BLOCK_D, BLOCK_N, PRECISION, False,
    )  # fmt: skip
    m, total, acc = _attend(
        q, m, total, acc, whole, end, last, table_ptr, kv_head, k_ptr, v_ptr, scale,
        NUM_KV_HEADS, HEAD_SIZE, BLOCK_SIZE, BLOCK_D, BLOCK_N, PRECISION, True,
    )  # fmt: skip
    if context <= SPLIT:
        tl.store(out_ptr + at, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=present)
    else:
        part = (row.to(tl.int64) * NUM_HEADS + head) * NUM_SPLITS + split
        tl.store(part_m_ptr + part, m, mask=exists)
        tl.store(part_total_ptr + part, total, mask=exists)
        tl.store(part_ptr + part[:, None] * HEAD_SIZE + d[None, :], acc, mask=present)


@triton.jit
def _combine_kernel(
    out_ptr,
    part_ptr,
    part_m_ptr,
    part_total_ptr,
    starts_ptr,
    contexts_ptr,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLIT: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    SPLITS_AT_ONCE: tl.constexpr,
):
    """Join the splits of one query head of a row of one token."""
    row = tl.program_id(1)
    first = tl.load(starts_ptr + row)
    context = tl.load(contexts_ptr + row).to(tl.int32)
    if (tl.load(starts_ptr + row + 1) - first != 1) | (context <= SPLIT):
        return
    head = tl.program_id(0)
    d = tl.arange(0, BLOCK_D)
    inside = d < HEAD_SIZE
    base = (row.to(tl.int64) * NUM_HEADS + head) * NUM_SPLITS
    m = -float("inf")
    total = 0.0
    acc = tl.zeros([BLOCK_D], tl.float32)
    num_splits = tl.cdiv(context, SPLIT)
    for start in range(0, num_splits, SPLITS_AT_ONCE):
        split = start + tl.arange(0, SPLITS_AT_ONCE)
        exists = split < num_splits
        part_m = tl.load(part_m_ptr + base + split, mask=exists, other=float("-inf"))
        new_m = tl.maximum(m, tl.max(part_m, axis=0))
        fade, gain = tl.exp2(m - new_m), tl.exp2(part_m - new_m)
        part_total = tl.load(part_total_ptr + base + split, mask=exists, other=0.0)
        total = total * fade + tl.sum(part_total * gain, axis=0)
        at = (base + split)[:, None] * HEAD_SIZE + d[None, :]
        part = tl.load(part_ptr + at, mask=exists[:, None] & inside[None, :], other=0.0)
        acc = acc * fade + tl.sum(part * gain[:, None], axis=0)
        m = new_m
    at = (first * NUM_HEADS + head) * HEAD_SIZE + d
    tl.store(out_ptr + at, (acc / total).to(out_ptr.dtype.element_ty), mask=inside)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    scale: float,
    max_query_len: int,
    max_context_len: int,
) -> Tensor:
    """Attention of `[T, Hq, D]` over caches `[N, B, Hk, D]` -> `[T, Hq, D]`.

    `query_starts [R + 1] int64`; `context_lens [R] int64`, this step's tokens included; `block_tables [R, n] int64`. A
    row's query i of n sees the first `context - n + i + 1` keys. Float32 is computed in full precision.
    """
    num_rows = len(context_lens)
    num_tokens, num_heads, head_size = q.shape
    block_size, num_kv_heads = k_cache.shape[1:3]
    group = num_heads // num_kv_heads
    out = torch.empty_like(q)
    if not num_tokens:
        return out
    sizes = {
        "NUM_HEADS": num_heads,
        "HEAD_SIZE": head_size,
        "BLOCK_D": max(triton.next_power_of_2(head_size), 16),
    }
    cache = {
        "NUM_KV_HEADS": num_kv_heads,
        "BLOCK_SIZE": block_size,
        "BLOCK_N": 32 if q.element_size() == 4 else 128 if head_size <= 128 else 64,
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
    }
    exponent_scale = scale * LOG2_E
    if max_query_len > 1:
        block_m = max(128 if q.element_size() == 2 else 32, triton.next_power_of_2(group), 16)
        tiles = triton.cdiv(max_query_len, block_m // group)
        _long_rows_kernel[(tiles, num_kv_heads, num_rows)](
            q, out, k_cache, v_cache, query_starts, context_lens, block_tables, block_tables.stride(0),
            exponent_scale, BLOCK_M=block_m, num_warps=8, num_stages=2, **sizes, **cache,
        )  # fmt: skip
    if num_tokens < num_rows * max_query_len or max_query_len == 1:
        num_splits = triton.next_power_of_2(triton.cdiv(max_context_len, SPLIT))
        split_out = num_splits if num_splits > 1 else 0
        part = q.new_empty((num_rows, num_heads, split_out, head_size), dtype=torch.float32)
        part_m = q.new_empty((num_rows, num_heads, split_out), dtype=torch.float32)
        part_total = torch.empty_like(part_m)
        splits = {"SPLIT": SPLIT, "NUM_SPLITS": num_splits}
        _single_rows_kernel[(triton.cdiv(max_context_len, SPLIT), num_kv_heads, num_rows)](
            q, out, part, part_m, part_total, k_cache, v_cache, query_starts, context_lens, block_tables,
            block_tables.stride(0), exponent_scale, BLOCK_M=max(triton.next_power_of_2(group), 16), num_warps=4,
            num_stages=3, **sizes, **cache, **splits,
        )  # fmt: skip
        if num_splits > 1:
            _combine_kernel[(num_heads, num_rows)](
                out,
                part,
                part_m,
                part_total,
                query_starts,
                context_lens,
                SPLITS_AT_ONCE=SPLITS_AT_ONCE,
                num_warps=4,
                **sizes,
                **splits,
            )
    return out
