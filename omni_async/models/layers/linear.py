"""Matrices, fused along their outputs where they read the same input."""

from collections.abc import Mapping

import torch
from torch import Tensor

from omni_async.backend.ops import Ops
from omni_async.models.layers.norm import RMSNorm
from omni_async.models.layers.weights import Destinations


class Linear:
    """`x W^T + b`, where W stacks the checkpoint's matrices `parts` (name -> outputs), so one product serves all."""

    def __init__(
        self, num_inputs: int, parts: Mapping[str, int], *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._parts = dict(parts)
        num_outputs = sum(self._parts.values())
        self.weight = torch.empty((num_outputs, num_inputs), dtype=dtype, device=device)
        self.bias = torch.empty(num_outputs, dtype=dtype, device=device) if bias else None

    def __call__(self, x: Tensor, ops: Ops, residual: Tensor | None = None) -> Tensor:
        """`[T, I]` -> `[T, O]`; a residual `[T, O]` is added, and may be overwritten."""
        return ops.linear(x, self.weight, self.bias, residual)

    def after_norm(self, x: Tensor, norm: RMSNorm, ops: Ops, *, gated: bool = False) -> Tensor:
        """The product with the norm of `x`; `gated`: `silu(gate) * up` of its halves."""
        return ops.norm_linear(x, norm.weight, norm.eps, self.weight, self.bias, gated=gated)

    def destinations(self, prefix: str) -> Destinations:
        """Where the checkpoint's matrices and biases belong."""
        first = 0
        for name, size in self._parts.items():
            yield f"{prefix}{name}.weight", self.weight[first : first + size]
            if self.bias is not None:
                yield f"{prefix}{name}.bias", self.bias[first : first + size]
            first += size
