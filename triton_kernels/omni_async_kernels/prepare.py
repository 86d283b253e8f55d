"""The first and the last kernel of a step: inputs from the device-resident tables, and appending what was drawn."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from omni_async_kernels.launch import launch_overlapping, wait_for_predecessor

BLOCK = 32
"""Tokens, rows and sampled rows of one program."""

ROWS = 64
"""Rows that a program compares with its tokens at once."""


# Numbers that change from step to step must not lead to kernels of their own.
@triton.jit(do_not_specialize=["num_tokens", "num_rows", "num_sampled"])
def _prepare_kernel(
    slots_ptr,
    starts_ptr,
    query_starts_ptr,
    new_places_ptr,
    new_blocks_ptr,
    sampled_ptr,
    tokens_ptr,
    tokens_stride,
    tables_ptr,
    tables_stride,
    token_ids_ptr,
    positions_ptr,
    mapping_ptr,
    row_slots_ptr,
    row_starts_ptr,
    contexts_ptr,
    sampled_tokens_ptr,
    sampled_slots_ptr,
    sampled_lengths_ptr,
    num_tokens,
    num_rows,
    num_sampled,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_predecessor(OVERLAP)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)

    # Tokens. A token's row is the number of rows that end at or before it; padding lies behind the last.
    row = tl.zeros([BLOCK], tl.int32)
    for first in range(0, num_rows, ROWS):
        other = first + tl.arange(0, ROWS)
        end = tl.load(query_starts_ptr + 1 + other, mask=other < num_rows, other=2147483647)
        row += tl.sum((end[None, :] <= at[:, None]).to(tl.int32), axis=1)
    real = (at < num_tokens) & (row < num_rows)
    slot = tl.load(slots_ptr + row, mask=real, other=0).to(tl.int64)
    start = tl.load(starts_ptr + row, mask=real, other=0)
    position = tl.where(real, start + at - tl.load(query_starts_ptr + row, mask=real, other=0), 0)
    token = tl.load(tokens_ptr + slot * tokens_stride + position, mask=real, other=0)
    block = tl.load(tables_ptr + slot * tables_stride + position // BLOCK_SIZE, mask=real, other=0)
    # The new block may not be in the table yet: another program of this launch writes it.
    is_new = tl.load(new_places_ptr + row, mask=real, other=-1) == position // BLOCK_SIZE
    block = tl.where(is_new, tl.load(new_blocks_ptr + row, mask=real, other=0), block).to(tl.int64)
    place = tl.where(real & (block > 0), block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
    tl.store(token_ids_ptr + at, token.to(tl.int64), mask=at < num_tokens)
    tl.store(positions_ptr + at, position.to(tl.int64), mask=at < num_tokens)
    tl.store(mapping_ptr + at, place, mask=at < num_tokens)

    # Rows, and the end of the last one.
    is_row = at < num_rows
    begin = tl.load(query_starts_ptr + at, mask=at <= num_rows, other=0)
    end = tl.load(query_starts_ptr + 1 + at, mask=is_row, other=0)
    first = tl.load(starts_ptr + at, mask=is_row, other=0)
    tl.store(row_starts_ptr + at, begin.to(tl.int64), mask=at <= num_rows)
    slot = tl.load(slots_ptr + at, mask=is_row, other=-1).to(tl.int64)
    place = tl.load(new_places_ptr + at, mask=is_row, other=-1)
    gained = tl.load(new_blocks_ptr + at, mask=is_row, other=0)
    tl.store(tables_ptr + slot * tables_stride + place, gained, mask=is_row & (slot >= 0) & (place >= 0))
    tl.store(row_slots_ptr + at, slot, mask=is_row)
    tl.store(contexts_ptr + at, (first + end - begin).to(tl.int64), mask=is_row)

    # Sampled rows.
    row = tl.load(sampled_ptr + at, mask=at < num_sampled, other=-1)
    real = row >= 0
    end = tl.load(query_starts_ptr + 1 + row, mask=real, other=1)
    begin = tl.load(query_starts_ptr + row, mask=real, other=1)
    first = tl.load(starts_ptr + row, mask=real, other=0)
    slot = tl.load(slots_ptr + row, mask=real, other=-1)
    tl.store(sampled_tokens_ptr + at, (end - 1).to(tl.int64), mask=at < num_sampled)
    tl.store(sampled_slots_ptr + at, slot.to(tl.int64), mask=at < num_sampled)
    tl.store(sampled_lengths_ptr + at, (first + end - begin).to(tl.int64), mask=at < num_sampled)


@triton.jit(do_not_specialize=["size"])
def _append_kernel(
    ids_ptr,
    finite_ptr,
    slots_ptr,
    lengths_ptr,
    tokens_ptr,
    tokens_stride,
    out_ptr,
    size,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_predecessor(OVERLAP)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    token = tl.load(ids_ptr + at, mask=inside, other=0).to(tl.int32)
    finite = tl.load(finite_ptr + at, mask=inside, other=0) != 0
    slot = tl.load(slots_ptr + at, mask=inside, other=-1)
    length = tl.load(lengths_ptr + at, mask=inside, other=0)
    tl.store(tokens_ptr + slot * tokens_stride + length, tl.where(finite, token, 0), mask=inside & (slot >= 0))
    tl.store(out_ptr + at, tl.where(finite, token, -1), mask=inside)


def prepare(
    slots: Tensor,
    starts: Tensor,
    query_starts: Tensor,
    new_places: Tensor,
    new_blocks: Tensor,
    sampled: Tensor,
    num_tokens: int,
    tokens: Tensor,
    block_tables: Tensor,
    block_size: int,
) -> tuple[Tensor, ...]:
    """The inputs of a step from its rows: `slots [R]`, `starts [R]`, `query_starts [R + 1]`, `sampled [S]`, all int32.

    Padding has slot -1 or sampled row -1. `tokens [slots, n] int32` and `block_tables [slots, m] int32` are the
    tables; the blocks `new_blocks [R]` are entered at `new_places [R]` (-1: none) of the rows' lines. Block 0 has no
    places. Returns, all int64: token ids, positions and cache places `[T]` (padding: 0, 0, -1); slots `[R]`, query
    starts `[R + 1]`, context lengths `[R]`; of the sampled rows `[S]` the last token's place in the step, the slot and
    the number of known tokens (padding: 0, -1, 0).
    """
    num_rows, num_sampled = len(slots), len(sampled)
    sizes = [num_tokens] * 3 + [num_rows, num_rows + 1, num_rows] + [num_sampled] * 3
    # Each part begins at a multiple of 16 bytes: kernels are compiled anew for addresses of another alignment.
    rooms = [size + size % 2 for size in sizes]
    parts = torch.split(torch.empty(sum(rooms), dtype=torch.int64, device=slots.device), rooms)
    out = tuple(part[:size] for part, size in zip(parts, sizes, strict=True))
    grid = (triton.cdiv(max(num_tokens, num_rows + 1, num_sampled), BLOCK),)
    launch_overlapping(
        _prepare_kernel,
        grid,
        slots,
        starts,
        query_starts,
        new_places,
        new_blocks,
        sampled,
        tokens,
        tokens.stride(0),
        block_tables,
        block_tables.stride(0),
        *out,
        num_tokens,
        num_rows,
        num_sampled,
        BLOCK_SIZE=block_size,
        BLOCK=BLOCK,
        ROWS=ROWS,
    )
    return out


def append(token_ids: Tensor, finite: Tensor, slots: Tensor, lengths: Tensor, tokens: Tensor) -> Tensor:
    """Write `token_ids [S] int64` to `tokens[slots, lengths]` (int32; slot -1: nothing); 0 where not `finite [S] bool`.

    `slots` and `lengths` are `[S] int64`. Returns `[S] int32`: the ids, -1 where not finite.
    """
    out = torch.empty(len(token_ids), dtype=torch.int32, device=token_ids.device)
    if len(token_ids):
        launch_overlapping(
            _append_kernel,
            (triton.cdiv(len(token_ids), BLOCK),),
            token_ids,
            finite,
            slots,
            lengths,
            tokens,
            tokens.stride(0),
            out,
            len(token_ids),
            BLOCK=BLOCK,
        )
    return out
