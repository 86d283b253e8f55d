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
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`norm(x) @ weight.T + bias`, gated or not, plus `residual`, by our kernel for one row or for more: `x [T, K]`."""
    kernel = vector_product if len(x) == 1 else matrix_product
    return kernel(x, norm, weight, bias, residual, out_dtype or x.dtype, tile, gated=gated)


def torch_product(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    """The same without a norm, by torch; the result may take the memory of `residual`."""
    if residual is None:
        return F.linear(x, weight, bias)
    if bias is None:
        # In place, since torch would copy the residual otherwise, in a launch of its own. The sum is rounded once.
        return residual.addmm_(x, weight.t())
    return F.linear(x, weight, bias).add_(residual)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`x @ weight.T + bias + residual`: `x [T, K]`, `weight [N, K]`, `bias [N]`, `residual [T, N]` -> `[T, N]`.

    All contiguous; summed in float32. The product is rounded before the residual is added; torch's own, which is used
    where it is faster, rounds once if there is no bias, and its result may take the memory of `residual`. `out_dtype`:
    of the result, if not that of `x`; not with a residual.
    """
    if not len(x):
        return x.new_empty((0, len(weight)), dtype=out_dtype)
    tile = tiles("linear" if residual is None else "linear_add", len(x), len(weight), x.shape[1], x.element_size())
    if tile is None and out_dtype not in (None, x.dtype):
        tile = FLOAT32 if x.dtype is torch.float32 else GENERAL
    if tile is None:
        return torch_product(x, weight, bias, residual)
    return product(x, weight, bias, tile, residual=residual, out_dtype=out_dtype)
