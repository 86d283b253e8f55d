"""The work of one step's attention, listed on the device: the same for all layers."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from omni_async_kernels import attention_tiles
from omni_async_kernels.attention_tiles import SHORT_TOKENS, long_tile, max_splits
from omni_async_kernels.launch import launch_overlapping, wait_for_predecessor

SPLIT_FIELDS, TILE_FIELDS = 9, 5
"""Numbers of one line of `AttentionWork.splits` and `.tiles`."""

TILES_AT_ONCE = 32
"""Tiles that the planning kernel writes together."""


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """What the launches of one step read, and the scratch that they share.

    The lists hold `counts` lines; rows with longer contexts come first, since they are most work.
    """

    splits: Tensor
    """`[., 9] int32`, contexts of short rows: table slot, first token, tokens, context, first position, end position,
    number of the split, number of splits, and the first line of the row's partial results. Lines behind the last have
    no tokens and no positions: a program need not know how many there are."""
    tiles: Tensor
    """`[., 5] int32`, tokens of long rows: table slot, first token of the row, tokens of the row, context, tile."""
    counts: Tensor
    """`[2] int32`: splits and tiles."""
    arrived: Tensor
    """`[., Hk] int32`: finished splits of the row whose first split this is; 0 between launches."""
    parts: Tensor
    """`[., Hq, D] f32`: results of single splits."""
    part_lse: Tensor
    """`[., Hq] f32`: base-2 logarithms of their sums of exponentials."""
    short_tokens: int
    """Rows of at most so many tokens are cut along their context."""
    window: int | None
    """The window that was planned for; none: the whole context."""

    def check_window(self, window: int | None) -> None:
        """Raise `ValueError` if a layer with this window needs more than was planned."""
        if self.window is not None and (window is None or window > self.window):
            raise ValueError(f"work planned for a window of {self.window} positions cannot serve one of {window}")


@triton.jit
def _sizes(length, context, WINDOW: tl.constexpr, SHORT: tl.constexpr, MAX_SPLITS: tl.constexpr,
           MIN_SPLIT: tl.constexpr, MULTIPLE: tl.constexpr, TILE_TOKENS: tl.constexpr):  # fmt: skip
    """First position, size and number of a row's splits, and the number of its tiles. They depend on this row alone."""
    start = tl.zeros_like(context)
    if WINDOW > 0:
        start = tl.maximum(context - length - WINDOW + 1, 0)
    seen = context - start
    size = tl.maximum(tl.cdiv(tl.cdiv(seen, MAX_SPLITS), MULTIPLE) * MULTIPLE, MIN_SPLIT)
    num_splits = tl.where((length > 0) & (length <= SHORT), tl.cdiv(seen, size), 0)
    num_tiles = tl.where(length > SHORT, tl.cdiv(length, TILE_TOKENS), 0)
    return start, size, num_splits, num_tiles


# Numbers that change from step to step must not lead to kernels of their own.
@triton.jit(do_not_specialize=["num_rows", "num_lines"])
def _plan_kernel(
    slots_ptr,
    query_starts_ptr,
    contexts_ptr,
    splits_ptr,
    tiles_ptr,
    counts_ptr,
    arrived_ptr,
    num_rows,
    num_lines,
    NUM_KV_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    SHORT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    SPLITS: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    MULTIPLE: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    TILES_AT_ONCE: tl.constexpr,
    SPLIT_FIELDS: tl.constexpr,
    TILE_FIELDS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The lines of one row, behind those of all rows with longer contexts."""
    wait_for_predecessor(OVERLAP)
    row = tl.program_id(0)
    other = tl.arange(0, ROWS)
    exists = other < num_rows
    first = tl.load(query_starts_ptr + other, mask=exists, other=0)
    lengths = (tl.load(query_starts_ptr + 1 + other, mask=exists, other=0) - first).to(tl.int32)
    contexts = tl.load(contexts_ptr + other, mask=exists, other=0).to(tl.int32)
    _, _, num_splits, num_tiles = _sizes(lengths, contexts, WINDOW, SHORT, MAX_SPLITS, MIN_SPLIT, MULTIPLE, TILE_TOKENS)
    total = tl.sum(num_splits, axis=0)
    if row == 0:
        tl.store(counts_ptr, total)
        tl.store(counts_ptr + 1, tl.sum(num_tiles, axis=0))
    # This program's share of the lines behind the last.
    split = tl.arange(0, SPLITS)
    behind = total + row * SPLITS + split
    for field in tl.static_range(SPLIT_FIELDS):
        tl.store(splits_ptr + behind * SPLIT_FIELDS + field, 0, mask=behind < num_lines)

    # This row.
    first = tl.load(query_starts_ptr + row)
    length = (tl.load(query_starts_ptr + row + 1) - first).to(tl.int32)
    context = tl.load(contexts_ptr + row).to(tl.int32)
    slot = tl.load(slots_ptr + row).to(tl.int32)
    before = (contexts > context) | ((contexts == context) & (other < row))
    first_split = tl.sum(tl.where(before, num_splits, 0), axis=0)
    first_tile = tl.sum(tl.where(before, num_tiles, 0), axis=0)
    first_part = tl.sum(tl.where(before & (num_splits > 1), num_splits * lengths, 0), axis=0)
    start, size, num_splits, num_tiles = _sizes(
        length, context, WINDOW, SHORT, MAX_SPLITS, MIN_SPLIT, MULTIPLE, TILE_TOKENS
    )

    line = splits_ptr + (first_split + split) * SPLIT_FIELDS
    mine = split < num_splits
    begin = start + split * size
    tl.store(line, slot, mask=mine)
    tl.store(line + 1, first.to(tl.int32), mask=mine)
    tl.store(line + 2, length, mask=mine)
    tl.store(line + 3, context, mask=mine)
    tl.store(line + 4, begin, mask=mine)
    tl.store(line + 5, tl.minimum(begin + size, context), mask=mine)
    tl.store(line + 6, split, mask=mine)
    tl.store(line + 7, num_splits, mask=mine)
    tl.store(line + 8, first_part, mask=mine)
    head = tl.arange(0, KV_HEADS)
    tl.store(arrived_ptr + first_split * NUM_KV_HEADS + head, 0, mask=(head < NUM_KV_HEADS) & (num_splits > 0))

    for done in range(0, num_tiles, TILES_AT_ONCE):
        at = done + tl.arange(0, TILES_AT_ONCE)
        entry = tiles_ptr + (first_tile + at) * TILE_FIELDS
        inside = at < num_tiles
        tl.store(entry, slot, mask=inside)
        tl.store(entry + 1, first.to(tl.int32), mask=inside)
        tl.store(entry + 2, length, mask=inside)
        tl.store(entry + 3, context, mask=inside)
        # The last tiles of a row see most of its context.
        tl.store(entry + 4, num_tiles - 1 - at, mask=inside)


def plan_attention(
    slots: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    num_tokens: int,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    dtype: torch.dtype,
    single: bool,
    window: int | None = None,
) -> AttentionWork:
    """List the work of a step for `paged_attention` or `attend_new_tokens`, in one launch.

    `slots [R]`, `query_starts [R + 1]` and `context_lens [R]` (this step's tokens included) are integers on the device;
    a row without tokens is padding. `num_tokens`: of the step, padding included. `dtype`: of the queries. `single`: no
    row has more than one token. Layers with a sliding window of at most `window` may share the work.
    """
    num_rows = len(context_lens)
    group = num_heads // num_kv_heads
    short = 1 if single else SHORT_TOKENS
    tile_tokens = max(long_tile(head_size, dtype).queries // group, 1)
    splits = max_splits(num_rows, num_kv_heads, single=single)
    short_rows = min(num_rows, num_tokens)
    long_rows = min(num_rows, num_tokens // (short + 1))
    parts = min(num_tokens, short * num_rows) * splits
    tiles = 0 if single or not long_rows else num_tokens // tile_tokens + long_rows

    def scratch(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=query_starts.device)

    work = AttentionWork(
        splits=scratch(short_rows * splits, SPLIT_FIELDS, dtype=torch.int32),
        tiles=scratch(tiles, TILE_FIELDS, dtype=torch.int32),
        counts=scratch(2, dtype=torch.int32),
        arrived=scratch(short_rows * splits, num_kv_heads, dtype=torch.int32),
        parts=scratch(parts, num_heads, head_size, dtype=torch.float32),
        part_lse=scratch(parts, num_heads, dtype=torch.float32),
        short_tokens=short,
        window=window,
    )
    launch_overlapping(
        _plan_kernel,
        (num_rows,),
        slots,
        query_starts,
        context_lens,
        work.splits,
        work.tiles,
        work.counts,
        work.arrived,
        num_rows,
        len(work.splits),
        NUM_KV_HEADS=num_kv_heads,
        KV_HEADS=triton.next_power_of_2(num_kv_heads),
        ROWS=triton.next_power_of_2(num_rows),
        WINDOW=window or 0,
        SHORT=short,
        MAX_SPLITS=splits,
        SPLITS=triton.next_power_of_2(splits),
        MIN_SPLIT=attention_tiles.MIN_SPLIT,
        MULTIPLE=attention_tiles.SPLIT_MULTIPLE,
        TILE_TOKENS=tile_tokens,
        TILES_AT_ONCE=TILES_AT_ONCE,
        SPLIT_FIELDS=SPLIT_FIELDS,
        TILE_FIELDS=TILE_FIELDS,
    )
    return work
