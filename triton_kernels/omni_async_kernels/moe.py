"""A mixture of experts: routing, then one of two ways through the experts, chosen by the number of tokens.

Few tokens: each pair of token and expert reads its weights. Many: pairs are sorted by expert, so that each expert's
weights are read once. Every grid follows from shapes alone.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from omni_async_kernels.moe_combine import combine
from omni_async_kernels.moe_few import few_tokens
from omni_async_kernels.moe_product import Tile, down_product, gated_product
from omni_async_kernels.moe_routing import route
from omni_async_kernels.moe_sort import sort_by_expert

FEW = 4
"""Pairs are not sorted while there are at most 1/FEW of them for each expert: few experts would be read twice."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """Tiles of both products, for a mean number of pairs an expert."""

    max_mean: float
    tile_size: int
    """Pairs of one tile."""
    gated: Tile
    down: Tile


TILINGS = (
    Tiling(11, 16, Tile(64, 128, 4, 4, 8), Tile(64, 128, 4, 4, 8)),
    Tiling(24, 32, Tile(64, 128, 4, 4, 8), Tile(64, 128, 4, 4, 8)),
    Tiling(52, 64, Tile(128, 64, 4, 4, 8), Tile(128, 64, 4, 4, 8)),
    Tiling(float("inf"), 128, Tile(128, 64, 8, 3, 2), Tile(256, 64, 8, 4, 1)),
)
"""For types of two bytes. Bounds: with random routing an expert seldom needs a second tile, which would read its
weights again."""

FLOAT32 = Tiling(float("inf"), 16, Tile(64, 32, 4, 3, 4), Tile(64, 32, 4, 3, 4))
"""Without matrix units."""


def through_experts(
    x: Tensor, experts: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, residual: Tensor
) -> Tensor:
    """The weighted sum of `down(silu(gate x) * up x)` over each token's experts, plus `residual`: `[T, H]` -> `[T, H]`.

    `experts [T, top_k] int32` in range, `weights [T, top_k] f32`, `gate_up [E, 2 I, H]`, `down [E, H, I]`,
    `residual [T, H]`; all contiguous. Rows do not affect each other, whatever they hold.
    """
    num_tokens, top_k = experts.shape
    num_experts = len(gate_up)
    num_pairs = num_tokens * top_k
    if not num_tokens:
        return torch.empty_like(x)
    if num_tokens == 1 or num_pairs * FEW <= num_experts:
        return few_tokens(x, experts, weights, gate_up, down, residual)
    mean = num_pairs / num_experts
    tiling = FLOAT32 if x.element_size() == 4 else next(tiling for tiling in TILINGS if mean <= tiling.max_mean)
    pairs = sort_by_expert(experts, num_experts, tiling.tile_size)
    activations = gated_product(x, gate_up, pairs, top_k, tiling.gated)
    return combine(down_product(activations, down, pairs, tiling.down), weights, residual)


def moe(
    x: Tensor,
    router_logits: Tensor,
    gate_up: Tensor,
    down: Tensor,
    top_k: int,
    renormalise: bool,
    residual: Tensor,
) -> Tensor:
    """Mixture of experts: softmax over `router_logits [T, E]`, the best `top_k`, weighted sum, plus `residual [T, H]`.

    `x [T, H]`, `gate_up [E, 2 I, H]`, `down [E, H, I]`; all contiguous; returns `[T, H]`. `renormalise` makes the
    chosen weights sum to 1; the lowest id comes first among equals. Rounds to the run dtype where the reference does,
    but for `few_tokens`.
    """
    experts, weights = route(router_logits, top_k, renormalise)
    return through_experts(x, experts, weights, gate_up, down, residual)
