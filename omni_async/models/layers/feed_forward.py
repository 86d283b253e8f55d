"""The two kinds of feed-forward block: one gated network, or a mixture of them."""

from itertools import chain
from typing import Protocol

import torch
from torch import Tensor

from omni_async.backend.ops import Ops
from omni_async.models.layers.linear import Linear
from omni_async.models.layers.norm import RMSNorm
from omni_async.models.layers.weights import Destinations


class FeedForward(Protocol):
    """The second half of a decoder layer."""

    def __call__(self, x: Tensor, norm: RMSNorm, ops: Ops) -> Tensor:
        """The residual stream `x [T, H]`, which may be overwritten, plus what is computed of its norm: `[T, H]`."""
        ...

    def destinations(self, prefix: str) -> Destinations:
        """Where the checkpoint's tensors belong."""
        ...


class GatedMLP:
    """`down(silu(gate x) * up x)` (SwiGLU, https://arxiv.org/abs/2002.05202)."""

    def __init__(
        self, hidden_size: int, inner_size: int, *, bias: bool = False, dtype: torch.dtype, device: torch.device
    ) -> None:
        parts = {"gate_proj": inner_size, "up_proj": inner_size}
        self.gate_up = Linear(hidden_size, parts, bias=bias, dtype=dtype, device=device)
        self.down = Linear(inner_size, {"down_proj": hidden_size}, bias=bias, dtype=dtype, device=device)

    def __call__(self, x: Tensor, norm: RMSNorm, ops: Ops) -> Tensor:
        """See `FeedForward`."""
        return self.down(self.gate_up.after_norm(x, norm, ops, gated=True), ops, residual=x)

    def destinations(self, prefix: str) -> Destinations:
        """Where the checkpoint's tensors belong."""
        return chain(self.gate_up.destinations(prefix), self.down.destinations(prefix))


class MixtureOfExperts:
    """`top_k` of many gated networks for each token, chosen and weighted by a linear router."""

    def __init__(
        self,
        hidden_size: int,
        inner_size: int,
        num_experts: int,
        top_k: int,
        *,
        renormalise: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._top_k = top_k
        self._renormalise = renormalise
        self._inner_size = inner_size
        self.router = Linear(hidden_size, {"gate": num_experts}, bias=False, dtype=dtype, device=device)
        self.gate_up = torch.empty((num_experts, 2 * inner_size, hidden_size), dtype=dtype, device=device)
        self.down = torch.empty((num_experts, hidden_size, inner_size), dtype=dtype, device=device)

    def __call__(self, x: Tensor, norm: RMSNorm, ops: Ops) -> Tensor:
        """See `FeedForward`."""
        normed = norm(x, ops)
        scores = self.router(normed, ops)
        return ops.moe(normed, scores, self.gate_up, self.down, self._top_k, self._renormalise, residual=x)

    def destinations(self, prefix: str) -> Destinations:
        """Where the checkpoint's tensors, three for each expert, belong."""
        yield from self.router.destinations(prefix)
        for expert, (gate_up, down) in enumerate(zip(self.gate_up, self.down, strict=True)):
            gate, up = gate_up.split(self._inner_size)
            yield f"{prefix}experts.{expert}.gate_proj.weight", gate
            yield f"{prefix}experts.{expert}.up_proj.weight", up
            yield f"{prefix}experts.{expert}.down_proj.weight", down
