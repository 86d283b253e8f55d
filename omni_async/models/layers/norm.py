"""Root-mean-square norm."""

import torch
from torch import Tensor

from omni_async.backend.ops import Ops
from omni_async.models.layers.weights import Destinations


class RMSNorm:
    """https://arxiv.org/abs/1910.07467."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = torch.empty(size, dtype=dtype, device=device)
        self.eps = eps

    def __call__(self, x: Tensor, ops: Ops) -> Tensor:
        """`[T, H]` -> `[T, H]`."""
        return ops.rms_norm(x, self.weight, self.eps)

    def destinations(self, prefix: str) -> Destinations:
        """Where the checkpoint's vector belongs."""
        yield f"{prefix}weight", self.weight
