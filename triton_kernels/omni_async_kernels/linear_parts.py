"""What the products with few rows share: the description of the norm before, and what is done to the results."""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Norm:
    """A root-mean-square norm of the input."""

    weight: Tensor
    """`[K]`."""
    eps: float


@triton.jit
def add_residual(y, residual, dtype: tl.constexpr):
    """`y + residual`, each rounded to the run dtype before, as the reference does."""
    return y.to(dtype).to(tl.float32) + residual.to(tl.float32)


@triton.jit
def silu_and_mul(gate, up, dtype: tl.constexpr):
    """`silu(gate) * up`, rounded to the run dtype at each step, as the reference does."""
    gate = gate.to(dtype).to(tl.float32)
    return (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32) * up.to(dtype).to(tl.float32)
