"""How attention is cut into work: tiles by shape and type, splits of a context by the number of rows."""

from dataclasses import dataclass

import torch
import triton

NUM_SMS = 132
"""Multiprocessors of the device that the sizes were chosen for; another number costs speed only."""

SHORT_TOKENS = 8
"""Rows of at most so many tokens are cut along their context, longer ones along their tokens."""

MIN_SPLIT = 512
"""Positions below which a context is not cut: joining the parts would cost more than reading them together."""

SPLIT_MULTIPLE = 128
"""Splits are multiples of this."""

LEAST_MAX_SPLITS, MOST_MAX_SPLITS = 2, 256
"""With many rows, a long one still spreads over several programs; with few, joining stays small."""

SHORT_TILE_BYTES = 16384
"""Of keys, and as many of values, that a program for short rows reads at once."""

SHORT_STAGES = 4
SHORT_PROGRAMS_PER_SM = 2
"""Each has up to three tiles of keys and values on their way: 192 KiB for a multiprocessor."""

FEW_TILE_BYTES = 32768
FEW_WARPS = 8
FEW_STAGES = 3
FEW_REGISTERS = 128
FEW_PROGRAMS_PER_SM = 1
"""The same for rows of one token where each of their key heads has a multiprocessor of its own: what counts is how
long a program takes. Few large tiles make a shorter chain, and one that leaves half of the registers to the kernel
before can start during it."""

PREFETCHED = 512
"""Positions, a power of two, that a program for rows of one token asks for while the kernel before still runs."""

JOINED_VALUES = 8192
"""Values of partial results that a program holds at once when it joins them."""


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program computes at once, and how many of them share a multiprocessor."""

    queries: int
    """Tokens times the query heads that share a key head."""
    keys: int
    num_warps: int
    num_stages: int
    programs_per_sm: int
    registers: int | None = None
    """The most that a thread may have; none: as many as there are."""


LONG_TILE = Tile(queries=128, keys=128, num_warps=8, num_stages=3, programs_per_sm=1)
"""For heads of at most 128 in types of two bytes."""

LONG_TILE_LARGE_HEAD = Tile(queries=128, keys=64, num_warps=8, num_stages=2, programs_per_sm=1)
"""For larger heads."""

LONG_TILE_FLOAT32 = Tile(queries=32, keys=32, num_warps=4, num_stages=2, programs_per_sm=2)
"""Float32 has no matrix unit."""


def padded_head(head_size: int) -> int:
    """The head size that a tile is computed with."""
    return int(max(triton.next_power_of_2(head_size), 16))


def long_tile(head_size: int, dtype: torch.dtype) -> Tile:
    """The tile of rows that are cut along their tokens."""
    if dtype == torch.float32:
        return LONG_TILE_FLOAT32
    return LONG_TILE if head_size <= 128 else LONG_TILE_LARGE_HEAD


def short_tile(group: int, tokens: int, head_size: int, dtype: torch.dtype, cache_dtype: torch.dtype) -> Tile:
    """The tile of rows of at most `tokens` tokens, `group` query heads for each key head."""
    queries = max(triton.next_power_of_2(group * tokens), 16)
    num_warps = 4 if queries <= 64 else 8
    if dtype == torch.float32:
        return Tile(queries, 32, num_warps, 2, SHORT_PROGRAMS_PER_SM)
    keys = SHORT_TILE_BYTES // (padded_head(head_size) * cache_dtype.itemsize)
    return Tile(queries, min(max(keys, 32), 128), num_warps, SHORT_STAGES, SHORT_PROGRAMS_PER_SM)


def few(num_rows: int, num_kv_heads: int) -> bool:
    """Whether each key head of each row has a multiprocessor of its own."""
    return num_rows * num_kv_heads <= NUM_SMS


def single_tile(
    num_rows: int, num_kv_heads: int, group: int, head_size: int, dtype: torch.dtype, cache_dtype: torch.dtype
) -> Tile:
    """The tile of rows of one token."""
    if dtype == torch.float32 or not few(num_rows, num_kv_heads):
        return short_tile(group, 1, head_size, dtype, cache_dtype)
    queries = max(triton.next_power_of_2(group), 16)
    keys = FEW_TILE_BYTES // (padded_head(head_size) * cache_dtype.itemsize)
    return Tile(queries, min(max(keys, 32), 128), FEW_WARPS, FEW_STAGES, FEW_PROGRAMS_PER_SM, FEW_REGISTERS)


def max_splits(num_rows: int, num_kv_heads: int, *, single: bool) -> int:
    """The most splits of one context: few rows together fill the device once. `single`: they have one token each."""
    per_sm = FEW_PROGRAMS_PER_SM if single and few(num_rows, num_kv_heads) else SHORT_PROGRAMS_PER_SM
    fill = NUM_SMS * per_sm // max(num_rows * num_kv_heads, 1)
    return min(max(fill, LEAST_MAX_SPLITS), MOST_MAX_SPLITS)
