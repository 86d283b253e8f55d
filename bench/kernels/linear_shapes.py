"""Products of decoding steps: shapes of models, random data, and times that no cache helps."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812
from omni_async_kernels.linear import product
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
    Shape("0.6B o", "linear", 1024, 2048),
    Shape("0.6B gate, up", "norm_linear_gated", 6144, 1024),
    Shape("0.6B down", "linear", 1024, 3072),
    Shape("0.6B head", "linear", 151936, 1024),
    Shape("8B qkv", "norm_linear", 6144, 4096),
    Shape("8B o", "linear", 4096, 4096),
    Shape("8B gate, up", "norm_linear_gated", 24576, 4096),
    Shape("8B down", "linear", 4096, 12288),
    Shape("8B head", "linear", 151936, 4096),
    Shape("30B-A3B qkv", "norm_linear", 5120, 2048),
    Shape("30B-A3B o", "linear", 2048, 4096),
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
    norm_weight: Tensor
    weights: Tensor
    """`[copies, N, K]`."""

    @classmethod
    def random(cls, shape: Shape, num_tokens: int, weights: Tensor, seed: int) -> "Case":
        """Random numbers everywhere."""
        return cls(
            shape=shape,
            x=random(num_tokens, shape.size, seed=seed),
            residual=random(num_tokens, shape.size, seed=seed + 1),
            norm_weight=random(shape.size, seed=seed + 2),
            weights=weights,
        )

    @property
    def moved_bytes(self) -> int:
        """What one product must read and write."""
        num_tokens, size = self.x.shape
        columns = self.shape.rows // 2 if self.shape.kind == "norm_linear_gated" else self.shape.rows
        of_input = num_tokens * size * (1 if self.shape.kind == "linear" else 3)
        return 2 * (self.shape.rows * size + of_input + num_tokens * columns)

    def chosen(self) -> Tile | None:
        """The tile that the package uses."""
        return tiles(self.shape.kind, len(self.x), self.shape.rows, self.shape.size, 2)

    def multiply(self, tile: Tile | None, weight: Tensor) -> object:
        """One product; without a tile by torch's, with our norm and activation around it."""
        if self.shape.kind == "linear":
            return F.linear(self.x, weight) if tile is None else product(self.x, weight, None, tile)
        gated = self.shape.kind == "norm_linear_gated"
        return norm_linear_with(tile, self.x, self.residual, self.norm_weight, 1e-6, weight, None, gated=gated)

    def samples_us(self, tile: Tile | None, repeats_ms: int) -> list[float]:
        """Times of one product: a graph of one for each copy of the weights, divided by their number."""
        return each_us([partial(self.multiply, tile, weight) for weight in self.weights], repeats_ms)


def random_weights(shape: Shape, seed: int) -> Tensor:
    """`[copies, N, K]`: as many copies as exceed every cache."""
    copies = -(-STREAMED_BYTES // (2 * shape.rows * shape.size))
    # 400 copies of the smallest weights exceed the caches as well.
    weights = torch.empty((min(copies, 400), shape.rows, shape.size), dtype=torch.bfloat16, device="cuda")
    generator = torch.Generator("cuda").manual_seed(seed)
    return weights.normal_(std=shape.size**-0.5, generator=generator)


def each_us(works: Sequence[Callable[[], object]], repeats_ms: int) -> list[float]:
    """Times of one of the works, which run one after the other in one graph: what each adds, its launch included."""

    def run_all() -> None:
        for work in works:
            work()

    return [time * 1e3 / len(works) for time in samples_ms(run_all, repeats_ms)]
