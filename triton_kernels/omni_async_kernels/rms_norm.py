"""Root-mean-square norm of rows (https://arxiv.org/abs/1910.07467)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from omni_async_kernels.launch import launch_overlapping, wait_for_predecessor


@triton.jit
def _rms_norm_kernel(x_ptr, weight_ptr, y_ptr, size, eps, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    at = row * size + column
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    wait_for_predecessor(OVERLAP)
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(x * x, axis=0) / size + eps)
    tl.store(y_ptr + at, (x * scale * weight).to(y_ptr.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / rms(x) * weight` over the last axis of contiguous `x [..., H]`, computed in float32; `weight [H]`."""
    y = torch.empty_like(x)
    if x.numel():
        size = x.shape[-1]
        block = triton.next_power_of_2(size)
        launch_overlapping(
            _rms_norm_kernel,
            (x.numel() // size,),
            x,
            weight,
            y,
            size,
            eps,
            BLOCK=block,
            num_warps=min(max(block // 512, 1), 16),
        )
    return y
