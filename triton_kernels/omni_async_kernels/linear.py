"""The product with a matrix of weights, made for the few rows of a decoding step."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from omni_async_kernels.linear_matrix import matrix_product
from omni_async_kernels.linear_parts import Norm
from omni_async_kernels.linear_tiles import FLOAT32, GENERAL, Tile, tiles
from omni_async_kernels.linear_vector import vector_product


def product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tile: Tile,
    *,
    norm: Norm | None = None,
    gated: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`norm(x) @ weight.T + bias`, gated or not, by our kernel for the number of rows in `x [T, K]`, 1 or more."""
    kernel = vector_product if len(x) == 1 else matrix_product
    return kernel(x, norm, weight, bias, out_dtype or x.dtype, tile, gated=gated)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
    """Contiguous `x [T, K]`, `weight [N, K]`, `bias [N]` -> `[T, N]`, summed in float32 and rounded once.

    `out_dtype`: of the result, if not that of `x`. Torch's own product is used where it is faster.
    """
    if not len(x):
        return x.new_empty((0, len(weight)), dtype=out_dtype)
    tile = tiles("linear", len(x), len(weight), x.shape[1], x.element_size())
    if tile is None and out_dtype not in (None, x.dtype):
        tile = FLOAT32 if x.dtype is torch.float32 else GENERAL
    return F.linear(x, weight, bias) if tile is None else product(x, weight, bias, tile, out_dtype=out_dtype)
