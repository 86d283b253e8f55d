"""The gated activation of a feed-forward block: SiLU of the first half times the second half."""

import triton
import triton.language as tl
from torch import Tensor

from omni_async_kernels.launch import launch_overlapping, wait_for_predecessor

BLOCK = 1024


@triton.jit
def _silu_and_mul_kernel(gate_up_ptr, out_ptr, size, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    wait_for_predecessor(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    gate = tl.load(gate_up_ptr + row * 2 * size + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * size + size + column, mask=inside, other=0.0)
    # Rounded to the run dtype between the two, as the reference does.
    activated = (gate * tl.sigmoid(gate)).to(up.dtype)
    tl.store(out_ptr + row * size + column, activated * up, mask=inside)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Contiguous `[T, 2 I]` -> `[T, I]`."""
    size = gate_up.shape[-1] // 2
    out = gate_up.new_empty((len(gate_up), size))
    if out.numel():
        launch_overlapping(
            _silu_and_mul_kernel, (len(gate_up), triton.cdiv(size, BLOCK)), gate_up, out, size, BLOCK=BLOCK, num_warps=4
        )
    return out
