"""Pairs of token and expert sorted by expert, and cut into tiles of one expert each."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from omni_async_kernels.launch import launch_overlapping, wait_for_predecessor

MIN_BLOCK, MAX_BLOCK = 128, 4096
"""Pairs that one program looks at together; at least one for each of its threads."""


@dataclass(frozen=True, slots=True)
class SortedPairs:
    """`P = T * top_k` pairs by expert; pair p is slot `p % top_k` of token `p // top_k`."""

    order: Tensor
    """`[P] int32`: the pairs, by expert and then by number."""
    tiles: Tensor
    """`[n, 3] int32`: expert, first position in `order`, and the position after the expert's last; n by shapes only."""
    num_tiles: Tensor
    """`[1] int32`: the tiles that exist; those behind hold anything."""
    tile_size: int
    """A tile ends after this many pairs or where its expert's pairs end."""


@triton.jit
def _sort_kernel(
    experts_ptr,
    order_ptr,
    tiles_ptr,
    num_tiles_ptr,
    num_pairs,
    TILE_SIZE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_T: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Place one expert's pairs: count all pairs first, so that no program needs another's result."""
    wait_for_predecessor(OVERLAP)
    expert = tl.program_id(0)
    any_expert = tl.arange(0, BLOCK_E)
    counts = tl.zeros([BLOCK_E], tl.int32)
    for first in range(0, num_pairs, BLOCK_P):
        pair = first + tl.arange(0, BLOCK_P)
        exists = pair < num_pairs
        counts += tl.histogram(tl.load(experts_ptr + pair, mask=exists, other=0), BLOCK_E, mask=exists)
    tile_counts = tl.cdiv(counts, TILE_SIZE)
    if expert == 0:
        tl.store(num_tiles_ptr, tl.sum(tile_counts, axis=0))
    count = tl.sum(tl.where(any_expert == expert, counts, 0), axis=0)
    if count == 0:
        return
    start = tl.sum(tl.where(any_expert < expert, counts, 0), axis=0)
    first_tile = tl.sum(tl.where(any_expert < expert, tile_counts, 0), axis=0)
    num_tiles = tl.cdiv(count, TILE_SIZE)
    for first in range(0, num_tiles, BLOCK_T):
        tile = first + tl.arange(0, BLOCK_T)
        mine = tile < num_tiles
        at = tiles_ptr + (first_tile + tile) * 3
        tl.store(at, tl.zeros([BLOCK_T], tl.int32) + expert, mask=mine)
        tl.store(at + 1, start + tile * TILE_SIZE, mask=mine)
        tl.store(at + 2, tl.zeros([BLOCK_T], tl.int32) + start + count, mask=mine)
    placed = start
    for first in range(0, num_pairs, BLOCK_P):
        pair = first + tl.arange(0, BLOCK_P)
        mine = tl.load(experts_ptr + pair, mask=pair < num_pairs, other=-1) == expert
        one = mine.to(tl.int32)
        tl.store(order_ptr + placed + tl.cumsum(one, axis=0) - 1, pair, mask=mine)
        placed += tl.sum(one, axis=0)


def sort_by_expert(experts: Tensor, num_experts: int, tile_size: int) -> SortedPairs:
    """Sort the pairs of contiguous `experts [T, top_k] int32`, whose ids lie in `[0, num_experts)`."""
    num_pairs = experts.numel()
    # Each expert in use adds at most one tile that is not full.
    max_tiles = min(num_pairs, num_pairs // tile_size + num_experts)
    pairs = SortedPairs(
        order=torch.empty(num_pairs, dtype=torch.int32, device=experts.device),
        tiles=torch.empty((max_tiles, 3), dtype=torch.int32, device=experts.device),
        num_tiles=torch.empty(1, dtype=torch.int32, device=experts.device),
        tile_size=tile_size,
    )
    block = min(max(triton.next_power_of_2(num_pairs), MIN_BLOCK), MAX_BLOCK)
    launch_overlapping(
        _sort_kernel,
        (num_experts,),
        experts,
        pairs.order,
        pairs.tiles,
        pairs.num_tiles,
        num_pairs,
        TILE_SIZE=tile_size,
        BLOCK_P=block,
        BLOCK_E=triton.next_power_of_2(num_experts),
        BLOCK_T=32,
        num_warps=8 if block > 1024 else 4,
    )
    return pairs
