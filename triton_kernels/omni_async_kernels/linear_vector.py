"""The product of one row with a matrix of weights; on request normalised before, and after it activated or added.

Vectors, not matrix units: reading the weights is all the work. A program reads whole rows of the weights, straight to
registers and with nothing between the loads, so that all of its bytes are on their way at once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from omni_async_kernels.launch import launch_overlapping, wait_for_predecessor
from omni_async_kernels.linear_parts import Norm, add_residual, silu_and_mul
from omni_async_kernels.linear_tiles import Tile


@triton.jit
def _vector_kernel(
    x_ptr,
    norm_weight_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    y_ptr,
    num_columns,
    size,
    eps,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    EVEN_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    first = tl.program_id(0) * ROWS
    # Columns past the last one repeat it and are not stored.
    row = tl.minimum(tl.arange(0, ROWS), num_columns - 1 - first)
    # The input is a matrix of one row: its layout over the threads is then that of the weights.
    k = tl.arange(0, BLOCK_K)[None, :]
    at = row[:, None] * size + k
    gate_ptr = weight_ptr + first.to(tl.int64) * size
    up_ptr = weight_ptr + (first + num_columns).to(tl.int64) * size
    column = first + row
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + column)
        if GATED:
            up_bias = tl.load(bias_ptr + num_columns + column)
    for block in tl.static_range(NUM_BLOCKS):
        start = block * BLOCK_K
        inside = (start + k < size) | EVEN_K
        gate_weight = tl.load(gate_ptr + start + at, mask=inside, other=0.0, eviction_policy="evict_first")
        if GATED:
            up_weight = tl.load(up_ptr + start + at, mask=inside, other=0.0, eviction_policy="evict_first")
        if norm_weight_ptr is not None:
            norm_weight = tl.load(norm_weight_ptr + start + k, mask=inside, other=0.0)
        if block == 0:
            # No kernel makes the weights: their loads begin before the kernel that makes the input has ended.
            wait_for_predecessor(OVERLAP)
            if residual_ptr is not None:
                residual = tl.load(residual_ptr + column)
        x = tl.load(x_ptr + start + k, mask=inside, other=0.0).to(tl.float32)
        if norm_weight_ptr is not None:
            # The factor `1 / rms` is the same for the whole row: it is left to the end, when all squares are known.
            if block == 0:
                squares = x * x
            else:
                squares += x * x
            x *= norm_weight.to(tl.float32)
        if block == 0:
            gate = gate_weight.to(tl.float32) * x
        else:
            gate += gate_weight.to(tl.float32) * x
        if GATED:
            if block == 0:
                up = up_weight.to(tl.float32) * x
            else:
                up += up_weight.to(tl.float32) * x
    gate = tl.sum(gate, axis=1)
    if norm_weight_ptr is not None:
        scale = 1 / tl.sqrt(tl.sum(squares, axis=1) / size + eps)
        gate *= scale
    if bias_ptr is not None:
        gate += bias.to(tl.float32)
    if GATED:
        up = tl.sum(up, axis=1)
        if norm_weight_ptr is not None:
            up *= scale
        if bias_ptr is not None:
            up += up_bias.to(tl.float32)
        gate = silu_and_mul(gate, up, y_ptr.dtype.element_ty)
    if residual_ptr is not None:
        gate = add_residual(gate, residual, y_ptr.dtype.element_ty)
    tl.store(y_ptr + column, gate.to(y_ptr.dtype.element_ty), mask=first + tl.arange(0, ROWS) < num_columns)


def vector_product(
    x: Tensor,
    norm: Norm | None,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out_dtype: torch.dtype,
    tile: Tile,
    *,
    gated: bool,
) -> Tensor:
    """`norm(x) @ weight.T + bias + residual` of contiguous `x [1, K]`, `weight [N, K]`, `bias [N]` -> `[1, N]`.

    `residual [1, N]`. `gated`: the weight's first half of rows gives the gates, the others `up`, and `silu(gate) * up`
    takes the product's place: `[1, N / 2]`.
    """
    num_columns = len(weight) // 2 if gated else len(weight)
    size = weight.shape[1]
    y = torch.empty((1, num_columns), dtype=out_dtype, device=x.device)
    launch_overlapping(
        _vector_kernel,
        (triton.cdiv(num_columns, tile.rows),),
        x,
        None if norm is None else norm.weight,
        weight,
        bias,
        residual,
        y,
        num_columns,
        size,
        0.0 if norm is None else norm.eps,
        GATED=gated,
        ROWS=tile.rows,
        BLOCK_K=tile.block_k,
        NUM_BLOCKS=triton.cdiv(size, tile.block_k),
        EVEN_K=size % tile.block_k == 0,
        num_warps=tile.num_warps,
    )
    return y
