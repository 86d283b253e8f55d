"""Matrix products of sorted pairs with their experts' weights, for many tokens.

The weights are the left operand: their rows fill the matrix unit's large side however few tokens an expert has. A fixed
number of programs share the tiles, so the grid does not depend on how many there are.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from omni_async_kernels.launch import launch_overlapping, wait_for_predecessor
from omni_async_kernels.moe_sort import SortedPairs

NUM_SMS = 132
"""Multiprocessors of the device that the tiles were chosen for; another number costs speed only."""


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program computes at once, and how many of them run."""

    rows: int
    """Rows of the weights; of gate and up together where there are both. A multiple of 16."""
    block_k: int
    num_warps: int
    num_stages: int
    programs_per_sm: int


@triton.jit
def _grouped_product_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    order_ptr,
    tiles_ptr,
    num_tiles_ptr,
    num_columns,
    size,
    TOP_K: tl.constexpr,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """`GATED`: gathers tokens, writes activations in sorted order; else reads those, writes in the pairs' own order."""
    wait_for_predecessor(OVERLAP)
    COLUMNS: tl.constexpr = ROWS // 2 if GATED else ROWS
    r = tl.arange(0, ROWS)
    if GATED:
        # Eight rows of gate, the same eight of up: what is multiplied later lies in one thread's accumulators.
        weight_column, part = r // 16 * 8 + r % 8, r // 8 % 2
        expert_size = 2 * num_columns.to(tl.int64) * size
    else:
        weight_column, part = r, tl.zeros([ROWS], tl.int32)
        expert_size = num_columns.to(tl.int64) * size
    column_in_tile = tl.arange(0, COLUMNS)
    k = tl.arange(0, BLOCK_K)
    column_tiles = tl.cdiv(num_columns, COLUMNS)
    num_tasks = tl.load(num_tiles_ptr) * column_tiles
    for task in range(tl.program_id(0), num_tasks, tl.num_programs(0)):
        tile_ptr = tiles_ptr + task // column_tiles * 3
        expert = tl.load(tile_ptr).to(tl.int64)
        position = tl.load(tile_ptr + 1) + tl.arange(0, TOKENS)
        exists = position < tl.load(tile_ptr + 2)
        pair = tl.load(order_ptr + position, mask=exists, other=0)
        if GATED:
            source, target = pair // TOP_K, position
        else:
            source, target = position, pair
        first_column = task % column_tiles * COLUMNS
        # Columns past the last one repeat it and are not stored.
        row = part * num_columns + tl.minimum(first_column + weight_column, num_columns - 1)
        weight_at = weight_ptr + expert * expert_size + (row[:, None] * size + k[None, :])
        x_at = x_ptr + source.to(tl.int64)[:, None] * size + k[None, :]
        acc = tl.zeros([ROWS, TOKENS], tl.float32)
        for start in range(0, size, BLOCK_K):
            if EVEN_K:
                weight = tl.load(weight_at + start)
                x = tl.load(x_at + start, mask=exists[:, None], other=0.0)
            else:
                inside = (start + k < size)[None, :]
                weight = tl.load(weight_at + start, mask=inside, other=0.0)
                x = tl.load(x_at + start, mask=exists[:, None] & inside, other=0.0)
            acc = tl.dot(weight, tl.trans(x), acc, input_precision=PRECISION)
        run_dtype = out_ptr.dtype.element_ty
        if GATED:
            both = tl.permute(tl.reshape(acc, (ROWS // 16, 2, 8, TOKENS)), (0, 2, 3, 1))
            gate, up = tl.split(both.to(run_dtype))
            # Rounded to the run dtype at each step, as the reference does.
            gate = gate.to(tl.float32)
            activated = (gate * tl.sigmoid(gate)).to(run_dtype).to(tl.float32) * up.to(tl.float32)
            result = tl.reshape(activated, (COLUMNS, TOKENS)).to(run_dtype)
        else:
            result = acc.to(run_dtype)
        column = first_column + column_in_tile
        at = out_ptr + target.to(tl.int64)[None, :] * num_columns + column[:, None]
        tl.store(at, result, mask=exists[None, :] & (column < num_columns)[:, None])


def _launch(x: Tensor, weight: Tensor, out: Tensor, pairs: SortedPairs, top_k: int, gated: bool, tile: Tile) -> None:
    num_columns, size = out.shape[1], x.shape[1]
    column_tiles = triton.cdiv(weight.shape[1], tile.rows)
    launch_overlapping(
        _grouped_product_kernel,
        (min(len(pairs.tiles) * column_tiles, NUM_SMS * tile.programs_per_sm),),
        x,
        weight,
        out,
        pairs.order,
        pairs.tiles,
        pairs.num_tiles,
        num_columns,
        size,
        TOP_K=top_k,
        GATED=gated,
        ROWS=tile.rows,
        TOKENS=pairs.tile_size,
        BLOCK_K=tile.block_k,
        EVEN_K=size % tile.block_k == 0,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def gated_product(x: Tensor, gate_up: Tensor, pairs: SortedPairs, top_k: int, tile: Tile) -> Tensor:
    """`silu(gate x) * up x` of each pair in sorted order: `x [T, H]`, `gate_up [E, 2 I, H]` -> `[T * top_k, I]`."""
    out = x.new_empty((len(pairs.order), gate_up.shape[1] // 2))
    _launch(x, gate_up, out, pairs, top_k, True, tile)
    return out


def down_product(activations: Tensor, down: Tensor, pairs: SortedPairs, tile: Tile) -> Tensor:
    """`down x` of each pair, sorted `[T * top_k, I]`, `down [E, H, I]` -> `[T * top_k, H]` in the pairs' own order."""
    out = activations.new_empty((len(pairs.order), down.shape[1]))
    _launch(activations, down, out, pairs, 1, False, tile)
    return out
