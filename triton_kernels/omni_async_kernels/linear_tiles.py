"""Tiles of products with few rows: the measured ones of `tuned/`, and a rule for other shapes."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import triton

TUNED = Path(__file__).parent / "tuned" / "linear_sm90.json"

MIN_TOKENS, MAX_TOKENS = 8, 64
"""Tokens that one program of the matrix product takes: the matrix unit's least, and what its registers hold."""

FEW_TOKENS = 16
"""Up to here the rule takes our product; torch's is left alone for more."""

Kind = Literal["linear", "linear_add", "norm_linear", "norm_linear_gated"]
"""A product alone, with a residual added to it, behind a norm, and so with the gated activation."""


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program computes, and how."""

    rows: int
    """Columns of the result; if gated, as many rows of gate and as many of up are read."""
    block_k: int
    """Values of a row of the weights that are read at once; a power of two."""
    num_warps: int
    num_stages: int = 1
    """Blocks under way to the matrix unit; the vector product has no use for it."""
    fuse_norm: bool = True
    """Whether each program normalises the input; else another launch does it once."""


GENERAL = Tile(rows=64, block_k=64, num_warps=4, num_stages=3, fuse_norm=False)
"""For any number of tokens, in types of two bytes."""

FLOAT32 = Tile(rows=32, block_k=32, num_warps=4, num_stages=2, fuse_norm=False)
"""For any number of tokens: float32 has no matrix unit."""

Key = tuple[Kind, int, int, int]
"""What is computed, the most tokens, and rows and columns of the weights."""


def read_tuned(path: Path) -> dict[Key, Tile | None]:
    """The measured tiles; none: torch's own product was faster."""
    return {
        (entry["kind"], entry["tokens"], entry["rows"], entry["size"]): entry["tile"] and Tile(**entry["tile"])
        for entry in json.loads(path.read_text())
    }


_TUNED = read_tuned(TUNED)


def bucket(num_tokens: int) -> int:
    """The number of tokens that tiles were measured for: the next power of two."""
    return 1 << (num_tokens - 1).bit_length()


def tiles(kind: Kind, num_tokens: int, num_rows: int, size: int, element_size: int) -> Tile | None:
    """How to multiply `[num_tokens, size]` with weights `[num_rows, size]`; none: leave it to torch."""
    if element_size == 2 and (key := (kind, bucket(num_tokens), num_rows, size)) in _TUNED:
        return _TUNED[key]
    parts = 2 if kind == "norm_linear_gated" else 1
    if num_tokens == 1:
        return vector_tile(num_rows // parts, parts, size, element_size)
    if element_size == 2 and num_tokens <= FEW_TOKENS:
        return matrix_tile(num_rows // parts, parts)
    return None


def vector_tile(num_columns: int, parts: int, size: int, element_size: int) -> Tile:
    """For one token: whole rows at once up to 8 kB, 128 bytes a thread, and two programs or more for each of 132 SMs.

    `parts`: rows of the weights for each column of the result.
    """
    per_warp = 32 * 16 // element_size
    block_k = min(triton.next_power_of_2(size), 16 * per_warp)
    num_warps = min(max(block_k // per_warp, 1), 8)
    most = max(8 * num_warps * per_warp // (block_k * parts), 1)
    rows = next((rows for rows in (8, 4, 2) if rows <= most and num_columns >= 2 * 132 * rows), 1)
    return Tile(rows, block_k, num_warps)


def matrix_tile(num_columns: int, parts: int) -> Tile:
    """For few tokens in types of two bytes: nearly as many programs as SMs, or more, if there are columns enough."""
    rows = next((rows for rows in (64, 32) if num_columns >= 120 * rows), 16)
    block_k = 128 if rows == 64 else 256
    num_stages = 4 if parts * rows * block_k <= 8192 else 3
    return Tile(rows, block_k, 4, num_stages)
