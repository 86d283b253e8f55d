"""What the products with few rows share: the reading of their input, normalised on request, and the activation."""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Norm:
    """A root-mean-square norm of the input, after a residual addition if there is one."""

    weight: Tensor
    """`[K]`."""
    eps: float
    residual: Tensor | None
    """`[T, K]`."""
    total: Tensor | None
    """`[T, K]`: written, input plus residual; none without a residual."""


@triton.jit
def load_input(x_ptr, residual_ptr, norm_weight, total_ptr, at, inside, mine):
    """A block of the input in float32, times the norm's weight, and its squares; what is not `inside` is 0.

    The factor `1 / rms` is the same for a whole row: it is left to the end, when all squares are known. The sum with
    the residual is stored if the block is `mine`.
    """
    # All loads come before the store: the compiler cannot know that it changes none of them.
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + at, mask=inside, other=0.0)
        # Rounded to the run dtype before it is squared, as the reference does: the sum is an output too.
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(total_ptr + at, x, mask=inside & mine)
    x = x.to(tl.float32)
    squares = x * x
    if norm_weight is not None:
        x *= norm_weight.to(tl.float32)
    return x, squares


@triton.jit
def silu_and_mul(gate, up, dtype: tl.constexpr):
    """`silu(gate) * up`, rounded to the run dtype at each step, as the reference does."""
    gate = gate.to(dtype).to(tl.float32)
    return (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32) * up.to(dtype).to(tl.float32)
