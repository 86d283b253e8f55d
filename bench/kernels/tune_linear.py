"""`python -m bench.kernels.tune_linear > linear_sm90.json`: the best tile for each shape and number of tokens.

The output is the whole table of the kernels' package, `tuned/linear_sm90.json`, with the entries measured now replaced;
progress goes to the error stream.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from itertools import product as every
from multiprocessing import get_context
from statistics import median

import torch
from omni_async_kernels.linear_tiles import MIN_TOKENS, TUNED, Key, Kind, Tile, read_tuned
from triton.errors import TritonError

from bench.kernels.linear_shapes import SHAPES, Case, Shape, random_weights

BUCKETS = (1, 2, 4, 8, 16, 32, 64)
SHARED_BYTES = 227 * 1024
GLANCES, FINALISTS = 10, 3
"""Replays for a first look at a tile, and how many tiles are measured after it."""
MARGIN = 0.98
"""Torch's product is kept unless ours takes less than this share of its time."""


def vector_tiles(shape: Shape) -> Iterator[Tile]:
    """For one token: 32 to 256 bytes of weights in each thread's registers, 16 of them at a time."""
    parts = 2 if shape.kind == "norm_linear_gated" else 1
    whole = 1 << (shape.size - 1).bit_length()
    for block_k, num_warps, rows in every((512, 1024, 2048, 4096, 8192), (1, 2, 4, 8), (1, 2, 4, 8, 16)):
        each = parts * rows * block_k // (32 * num_warps)
        programs = shape.rows // (parts * rows)
        if (
            block_k <= whole <= 8 * block_k
            and 256 * num_warps <= block_k
            and 16 <= each <= 128
            and (programs >= 132 or rows == 1)
        ):
            yield Tile(rows, block_k, num_warps)


def matrix_tiles(shape: Shape, num_tokens: int) -> Iterator[Tile]:
    """For few tokens: at least 12 kB of weights under way in each program, or all that there are."""
    parts = 2 if shape.kind == "norm_linear_gated" else 1
    tokens = max(num_tokens, MIN_TOKENS)
    least = max(16, tokens // (2 * parts))
    fusing = (False, True) if shape.kind in ("norm_linear", "norm_linear_gated") else (False,)
    for rows, block_k, num_warps, num_stages, fuse_norm in every(
        (16, 32, 64, 128), (64, 128, 256, 512), (2, 4, 8), (3, 5), fusing
    ):
        programs = shape.rows / (parts * rows)
        weights = 2 * block_k * parts * rows
        # Asynchronous products (64 rows and more) hold one block more. The normalised input is stored once more.
        buffers = num_stages - (rows < 64)
        shared = weights * buffers + 2 * block_k * tokens * (buffers + fuse_norm)
        if (
            (num_warps == 4 or (rows == 16 if num_warps == 2 else rows >= 64))
            # Not fewer programs than that, nor so many, or so small, that the input is what they read most.
            and (rows == least or programs >= 48)
            and (rows >= 64 or programs <= 528)
            and rows >= least
            and min(12_000, parts * rows * shape.size) <= weights * (num_stages - 1)
            and shared <= SHARED_BYTES
            # The squares of the input and the norm's weight are in registers.
            and (tokens * block_k <= 1024 * num_warps or not fuse_norm)
        ):
            yield Tile(rows, block_k, num_warps, num_stages, fuse_norm)


def candidates(shape: Shape, num_tokens: int) -> list[Tile]:
    """The tiles to try."""
    return list(vector_tiles(shape) if num_tokens == 1 else matrix_tiles(shape, num_tokens))


Kernel = tuple[Kind, int, Tile, int]
"""What the product does, the number of tokens, the tile, and the length of a row: those that stand for all products
that share one compiled kernel."""


def kernel(shape: Shape, num_tokens: int, tile: Tile) -> Kernel:
    """The kernel that a product is computed by."""
    if num_tokens == 1:
        return shape.kind, 1, tile, shape.size
    kind: Kind = "linear" if shape.kind == "norm_linear" and not tile.fuse_norm else shape.kind
    return kind, max(num_tokens, MIN_TOKENS), tile, shape.size if shape.size % tile.block_k else tile.block_k


def works(wanted: Kernel) -> bool:
    """Compile by a launch, into the cache on disk; whether it fits the device."""
    kind, num_tokens, tile, size = wanted
    shape = Shape("", kind, 256, size)
    weights = torch.zeros((1, shape.rows, size), dtype=torch.bfloat16, device="cuda")
    try:
        Case.random(shape, num_tokens, weights, 0).multiply(tile, weights[0])
        torch.cuda.synchronize()
    except (TritonError, RuntimeError) as error:
        print(f"left out: {wanted}: {error}", file=sys.stderr, flush=True)
        return False
    return True


def working(cases: Sequence[tuple[Shape, int]], workers: int) -> set[Kernel]:
    """Compile the candidates of all cases in several processes."""
    wanted = sorted({kernel(shape, n, tile) for shape, n in cases for tile in candidates(shape, n)}, key=str)
    print(f"{len(wanted)} kernels", file=sys.stderr, flush=True)
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        return {one for one, does in zip(wanted, pool.map(works, wanted, chunksize=4), strict=True) if does}


def best(case: Case, tiles: Sequence[Tile], repeats_ms: int) -> Tile | None:
    """The tile of the least median time, of those that looked best; none if torch's product is as good."""
    finalists = sorted(tiles, key=lambda tile: case.glance_us(tile, GLANCES))[:FINALISTS]
    times = {tile: median(case.samples_us(tile, repeats_ms)) for tile in finalists}
    torch_us = median(case.samples_us(None, repeats_ms))
    if not times:
        return None
    tile = min(times, key=times.__getitem__)
    figures = f"{times[tile]:8.2f} us, {case.moved_bytes / times[tile] * 1e-6:5.2f} TB/s; torch {torch_us:8.2f} us"
    print(f"{case.shape.name:16} {len(case.x):3} tokens: {figures}; {tile}", file=sys.stderr, flush=True)
    return tile if times[tile] < MARGIN * torch_us else None


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.kernels.tune_linear", description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=BUCKETS, help="powers of two (all up to 64)")
    parser.add_argument("--shapes", default="", help="only shapes whose name holds this")
    parser.add_argument("--repeats-ms", type=int, default=15, help="time for one tile (%(default)s)")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes that compile (%(default)s)")
    options = parser.parse_args()
    shapes = [shape for shape in SHAPES if options.shapes in shape.name]
    usable = working([(shape, n) for shape in shapes for n in options.tokens], options.workers)
    table: dict[Key, Tile | None] = read_tuned(TUNED)
    for shape in shapes:
        weights = random_weights(shape, seed=0)
        for n in options.tokens:
            tiles = [tile for tile in candidates(shape, n) if kernel(shape, n, tile) in usable]
            case = Case.random(shape, n, weights, seed=1)
            table[shape.kind, n, shape.rows, shape.size] = best(case, tiles, options.repeats_ms)
    entries = [
        {"kind": kind, "tokens": n, "rows": rows, "size": size, "tile": tile and asdict(tile)}
        for (kind, n, rows, size), tile in sorted(table.items())
    ]
    print("[\n" + ",\n".join(f" {json.dumps(entry)}" for entry in entries) + "\n]")


if __name__ == "__main__":
    main()
