"""Products of decoding steps: shapes of models, random data, and times that no cache helps."""

from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import median

import torch
from omni_async_kernels.linear import product, torch_product
from omni_async_kernels.linear_tiles import Kind, Tile, tiles
from omni_async_kernels.norm_linear import norm_linear_with
from torch import Tensor

from bench.kernels.timing import random, samples_ms

STREAMED_BYTES = 400_000_000
"""Weights of one measured run: many times the L2 cache, so that each product reads its own from memory."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One product of a model's layer."""

    name: str
    kind: Kind
    rows: int
    """Rows of the weights."""
    size: int


SHAPES = (
    Shape("0.6B qkv", "norm_linear", 4096, 1024),
    Shape("0.6B o", "linear_add", 1024, 2048),
    Shape("0.6B gate, up", "norm_linear_gated", 6144, 1024),
    Shape("0.6B down", "linear_add", 1024, 3072),
    Shape("0.6B head", "linear", 151936, 1024),
    Shape("8B qkv", "norm_linear", 6144, 4096),
    Shape("8B o", "linear_add", 4096, 4096),
    Shape("8B gate, up", "norm_linear_gated", 24576, 4096),
    Shape("8B down", "linear_add", 4096, 12288),
    Shape("8B head", "linear", 151936, 4096),
    Shape("30B-A3B qkv", "norm_linear", 5120, 2048),
    Shape("30B-A3B o", "linear_add", 2048, 4096),
    Shape("30B-A3B router", "linear", 128, 2048),
    Shape("30B-A3B head", "linear", 151936, 2048),
)


@dataclass(frozen=True, slots=True)
class Case:
    """A shape with its data, for a number of tokens."""

    shape: Shape
    x: Tensor
    """`[T, K]`."""
    residual: Tensor
    """`[T, N]`: torch's product adds to it in place."""
    norm_weight: Tensor
    weights: Tensor
    """`[copies, N, K]`."""

    @classmethod
    def random(cls, shape: Shape, num_tokens: int, weights: Tensor, seed: int) -> "Case":
        """Random numbers everywhere."""
        return cls(
            shape=shape,
            x=random(num_tokens, shape.size, seed=seed),
            residual=random(num_tokens, shape.rows, seed=seed + 1),
            norm_weight=random(shape.size, seed=seed + 2),
            weights=weights,
        )

    @property
    def moved_bytes(self) -> int:
        """What one product must read and write."""
        num_tokens, size = self.x.shape
        gated = self.shape.kind == "norm_linear_gated"
        columns = self.shape.rows // 2 if gated else self.shape.rows
        of_result = columns * (2 if self.shape.kind == "linear_add" else 1)
        return 2 * (self.shape.rows * size + num_tokens * (size + of_result))

    def chosen(self) -> Tile | None:
        """The tile that the package uses."""
        return tiles(self.shape.kind, len(self.x), self.shape.rows, self.shape.size, 2)

    def multiply(self, tile: Tile | None, weight: Tensor) -> object:
        """One product; without a tile by torch's, with our norm and activation around it."""
        if self.shape.kind in ("linear", "linear_add"):
            residual = self.residual if self.shape.kind == "linear_add" else None
            if tile is None:
                return torch_product(self.x, weight, None, residual)
            return product(self.x, weight, None, tile, residual=residual)
        gated = self.shape.kind == "norm_linear_gated"
        return norm_linear_with(tile, self.x, self.norm_weight, 1e-6, weight, None, gated=gated)

    def multiply_all(self, tile: Tile | None) -> None:
        """One product for each copy of the weights."""
        for weight in self.weights:
            self.multiply(tile, weight)

    def samples_us(self, tile: Tile | None, repeats_ms: int) -> list[float]:
        """Times of one product: a graph of one for each copy of the weights, divided by their number."""
        return [time * 1e3 / len(self.weights) for time in samples_ms(partial(self.multiply_all, tile), repeats_ms)]

    def glance_us(self, tile: Tile | None, num_replays: int) -> float:
        """The median of a few such times, taken in milliseconds."""
        self.multiply_all(tile)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.multiply_all(tile)
        graph.replay()
        events = [torch.Event("cuda", enable_timing=True) for _ in range(num_replays + 1)]
        for event in events[:-1]:
            event.record()
            graph.replay()
        events[-1].record()
        torch.cuda.synchronize()
        times_ms = [start.elapsed_time(end) for start, end in pairwise(events)]
        return median(times_ms) * 1e3 / len(self.weights)


def random_weights(shape: Shape, seed: int) -> Tensor:
    """`[copies, N, K]`: as many copies as exceed every cache."""
    copies = -(-STREAMED_BYTES // (2 * shape.rows * shape.size))
    # 400 copies of the smallest weights exceed the caches as well.
    weights = torch.empty((min(copies, 400), shape.rows, shape.size), dtype=torch.bfloat16, device="cuda")
    generator = torch.Generator("cuda").manual_seed(seed)
    return weights.normal_(std=shape.size**-0.5, generator=generator)
