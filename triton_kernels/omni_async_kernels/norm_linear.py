"""A root-mean-square norm and the product that follows it, with the gated activation if there is one."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from omni_async_kernels.linear import product
from omni_async_kernels.linear_parts import Norm
from omni_async_kernels.linear_tiles import Tile, tiles
from omni_async_kernels.rms_norm import rms_norm
from omni_async_kernels.silu_and_mul import silu_and_mul


def norm_linear(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    gated: bool,
) -> Tensor:
    """`rms_norm(x) @ weight.T + bias` of contiguous `x [T, K]`: `[T, N]`.

    `norm_weight [K]`, `weight [N, K]`, `bias [N]`. `gated`: the first half of the product is `gate`, the second `up`,
    and the result `silu(gate) * up`, `[T, N / 2]`. One launch for few rows. Where the norm is part of it, its result is
    not rounded (one row), or before the division by the root mean square (more rows).
    """
    if not len(x):
        return x.new_empty((0, len(weight) // 2 if gated else len(weight)))
    tile = tiles("norm_linear_gated" if gated else "norm_linear", len(x), len(weight), x.shape[1], x.element_size())
    return norm_linear_with(tile, x, norm_weight, eps, weight, bias, gated=gated)


def norm_linear_with(
    tile: Tile | None,
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    *,
    gated: bool,
) -> Tensor:
    """`norm_linear` of one row or more in a given tile, or with torch's product."""
    # The matrix product would round before the division by the root mean square: too large for float16 at times.
    if tile is not None and tile.fuse_norm and (len(x) == 1 or x.dtype is not torch.float16):
        return product(x, weight, bias, tile, norm=Norm(norm_weight, eps), gated=gated)
    normed = rms_norm(x, norm_weight, eps)
    if tile is not None:
        return product(normed, weight, bias, tile, gated=gated)
    y = F.linear(normed, weight, bias)
    return silu_and_mul(y) if gated else y
