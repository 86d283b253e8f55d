"""The weighted sum over a token's experts."""

import triton
import triton.language as tl
from torch import Tensor

from omni_async_kernels.launch import launch_overlapping, wait_for_predecessor

BLOCK = 1024


@triton.jit
def _combine_kernel(
    routed_ptr, weights_ptr, out_ptr, size, TOP_K: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    wait_for_predecessor(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    acc = tl.zeros([BLOCK], tl.float32)
    for slot in tl.static_range(TOP_K):
        pair = token * TOP_K + slot
        weight = tl.load(weights_ptr + pair)
        acc += weight * tl.load(routed_ptr + pair * size + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * size + column, acc.to(out_ptr.dtype.element_ty), mask=inside)


def combine(routed: Tensor, weights: Tensor) -> Tensor:
    """`[T * top_k, H]`, `weights [T, top_k] f32` -> `[T, H]`, summed in float32 in the router's order."""
    num_tokens, top_k = weights.shape
    size = routed.shape[1]
    out = routed.new_empty((num_tokens, size))
    launch_overlapping(
        _combine_kernel,
        (num_tokens, triton.cdiv(size, BLOCK)),
        routed,
        weights,
        out,
        size,
        TOP_K=top_k,
        BLOCK=BLOCK,
        num_warps=4,
    )
    return out
