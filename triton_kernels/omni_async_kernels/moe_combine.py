"""The weighted sum over a token's experts, added to the residual."""

import triton
import triton.language as tl
from torch import Tensor

from omni_async_kernels.launch import launch_overlapping, wait_for_predecessor
from omni_async_kernels.linear_parts import add_residual

BLOCK = 1024


@triton.jit
def _combine_kernel(
    routed_ptr,
    weights_ptr,
    residual_ptr,
    out_ptr,
    size,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_predecessor(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    residual = tl.load(residual_ptr + token * size + column, mask=inside)
    acc = tl.zeros([BLOCK], tl.float32)
    for slot in tl.static_range(TOP_K):
        pair = token * TOP_K + slot
        weight = tl.load(weights_ptr + pair)
        acc += weight * tl.load(routed_ptr + pair * size + column, mask=inside, other=0.0).to(tl.float32)
    out = add_residual(acc, residual, out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * size + column, out.to(out_ptr.dtype.element_ty), mask=inside)


def combine(routed: Tensor, weights: Tensor, residual: Tensor) -> Tensor:
    """`[T * top_k, H]`, `weights [T, top_k] f32`, `residual [T, H]` -> `[T, H]`.

    Summed in float32 in the router's order, and rounded before the residual is added.
    """
    num_tokens, top_k = weights.shape
    size = routed.shape[1]
    out = routed.new_empty((num_tokens, size))
    launch_overlapping(
        _combine_kernel,
        (num_tokens, triton.cdiv(size, BLOCK)),
        routed,
        weights,
        residual,
        out,
        size,
        TOP_K=top_k,
        BLOCK=BLOCK,
        num_warps=4,
    )
    return out
