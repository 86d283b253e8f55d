"""The product of a few rows with a matrix of weights; on request normalised before, and after it activated or added.

The weights are the left operand: their rows fill the matrix unit's large side however few tokens there are. Blocks of
weights are copied to shared memory several steps ahead, so that enough bytes are on their way.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from omni_async_kernels.launch import launch_overlapping, prefetch, wait_for_predecessor
from omni_async_kernels.linear_parts import Norm, add_residual, silu_and_mul
from omni_async_kernels.linear_tiles import MAX_TOKENS, MIN_TOKENS, Tile

LINE = tl.constexpr(128)
"""Bytes of a line of the L2 cache."""


@triton.jit(do_not_specialize=["num_tokens"])
def _matrix_kernel(
    x_ptr,
    norm_weight_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    y_ptr,
    num_tokens,
    num_columns,
    size,
    eps,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    # Tokens run fastest: programs that share weights read them at the same time.
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    present = (token < num_tokens)[:, None]
    first = tl.program_id(1) * ROWS
    # Columns past the last one repeat it and are not stored.
    row = tl.minimum(tl.arange(0, ROWS), num_columns - 1 - first)
    k = tl.arange(0, BLOCK_K)[None, :]
    weight_at = row[:, None] * size + k
    gate_ptr = weight_ptr + first.to(tl.int64) * size
    up_ptr = weight_ptr + (first + num_columns).to(tl.int64) * size
    x_at = token.to(tl.int64)[:, None] * size + k
    column = first + tl.arange(0, ROWS)
    y_at = token.to(tl.int64)[None, :] * num_columns + column[:, None]
    stored = tl.trans(present) & (column < num_columns)[:, None]
    if OVERLAP:
        # No kernel makes the weights: their way may begin before the kernel that makes the input has ended.
        PER_LINE: tl.constexpr = LINE // (weight_ptr.dtype.element_ty.primitive_bitwidth // 8)
        line = tl.arange(0, (BLOCK_K + PER_LINE - 1) // PER_LINE)[None, :] * PER_LINE
        for block in tl.static_range(NUM_STAGES):
            line_at = row[:, None] * size + tl.minimum(block * BLOCK_K + line, size - 1)
            prefetch(gate_ptr + line_at)
            if GATED:
                prefetch(up_ptr + line_at)
            if norm_weight_ptr is not None:
                prefetch(norm_weight_ptr + tl.minimum(block * BLOCK_K + line, size - 1))
    if norm_weight_ptr is not None:
        # A block ahead in registers, and repeated for each token, so that each thread holds what its part of x needs: a
        # row alone would be laid out in another way, and x be read from shared memory twice.
        norm_weight_at = norm_weight_ptr + tl.broadcast_to(k, [TOKENS, BLOCK_K])
        norm_weight = tl.load(norm_weight_at, mask=(k < size) | EVEN_K, other=0.0)
    wait_for_predecessor(OVERLAP)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + y_at, mask=stored)
    gate = tl.zeros([ROWS, TOKENS], tl.float32)
    up = tl.zeros([ROWS, TOKENS], tl.float32)
    squares = tl.zeros([TOKENS, BLOCK_K], tl.float32)
    for start in tl.range(0, size, BLOCK_K, num_stages=NUM_STAGES):
        inside = (start + k < size) | EVEN_K
        gate_weight = tl.load(gate_ptr + start + weight_at, mask=inside, other=0.0, eviction_policy="evict_first")
        x = tl.load(x_ptr + start + x_at, mask=present & inside, other=0.0)
        if norm_weight_ptr is not None:
            # The factor `1 / rms` is the same for a whole row: it is left to the end, when all squares are known.
            squares += x.to(tl.float32) * x.to(tl.float32)
            x *= norm_weight
            norm_weight = tl.load(norm_weight_at + start + BLOCK_K, mask=start + BLOCK_K + k < size, other=0.0)
        gate = tl.dot(gate_weight, tl.trans(x), gate, input_precision=PRECISION)
        if GATED:
            up_weight = tl.load(up_ptr + start + weight_at, mask=inside, other=0.0, eviction_policy="evict_first")
            up = tl.dot(up_weight, tl.trans(x), up, input_precision=PRECISION)
    if norm_weight_ptr is not None:
        scale = (1 / tl.sqrt(tl.sum(squares, axis=1) / size + eps))[None, :]
        gate *= scale
        up *= scale
    if bias_ptr is not None:
        gate += tl.load(bias_ptr + first + row).to(tl.float32)[:, None]
    if GATED:
        if bias_ptr is not None:
            up += tl.load(bias_ptr + num_columns + first + row).to(tl.float32)[:, None]
        gate = silu_and_mul(gate, up, y_ptr.dtype.element_ty)
    if residual_ptr is not None:
        gate = add_residual(gate, residual, y_ptr.dtype.element_ty)
    tl.store(y_ptr + y_at, gate.to(y_ptr.dtype.element_ty), mask=stored)


def matrix_product(
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
    """`norm(x) @ weight.T + bias + residual` of contiguous `x [T, K]`, `weight [N, K]`, `bias [N]` -> `[T, N]`.

    `residual [T, N]`. `gated`: the weight's first half of rows gives the gates, the others `up`, and `silu(gate) * up`
    takes the product's place: `[T, N / 2]`. With a norm, the input is rounded to the run dtype before its division by
    the row's root mean square, so float16 may overflow.
    """
    num_tokens, size = x.shape
    num_columns = len(weight) // 2 if gated else len(weight)
    tokens = min(max(triton.next_power_of_2(num_tokens), MIN_TOKENS), MAX_TOKENS)
    y = torch.empty((num_tokens, num_columns), dtype=out_dtype, device=x.device)
    launch_overlapping(
        _matrix_kernel,
        (triton.cdiv(num_tokens, tokens), triton.cdiv(num_columns, tile.rows)),
        x,
        None if norm is None else norm.weight,
        weight,
        bias,
        residual,
        y,
        num_tokens,
        num_columns,
        size,
        0.0 if norm is None else norm.eps,
        GATED=gated,
        ROWS=tile.rows,
        TOKENS=tokens,
        BLOCK_K=tile.block_k,
        EVEN_K=size % tile.block_k == 0,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        NUM_STAGES=tile.num_stages,
        num_warps=tile.num_warps,
    )
    return y
