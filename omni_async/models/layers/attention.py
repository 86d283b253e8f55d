"""Causal self-attention over the paged cache, with grouped key-value heads."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from omni_async.backend.ops import HeadNorm, Rotary, StepContext
from omni_async.errors import UnsupportedModel
from omni_async.models.layers.linear import Linear
from omni_async.models.layers.norm import RMSNorm
from omni_async.models.layers.weights import Destinations


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """What distinguishes one model's attention from another's.

    Raises:
        UnsupportedModel: the query heads cannot be shared out evenly among the key-value heads.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    qkv_bias: bool
    output_bias: bool
    head_norm_eps: float | None = None
    """Queries and keys have an RMS norm by head; `None`: they have not."""

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModel(
                f"num_attention_heads ({self.num_heads}) is not a multiple of num_key_value_heads ({self.num_kv_heads})"
            )


class Attention:
    """One layer's attention."""

    def __init__(
        self, hidden_size: int, shape: AttentionShape, rotary: Rotary, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._num_heads = shape.num_heads
        self._rotary = rotary
        self._scale = shape.head_size**-0.5
        query_size, key_size = shape.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size
        self.qkv = Linear(
            hidden_size,
            {"q_proj": query_size, "k_proj": key_size, "v_proj": key_size},
            bias=shape.qkv_bias,
            dtype=dtype,
            device=device,
        )
        self.output = Linear(query_size, {"o_proj": hidden_size}, bias=shape.output_bias, dtype=dtype, device=device)
        self._norms: dict[str, RMSNorm] = {}
        self._head_norm: HeadNorm | None = None
        if shape.head_norm_eps is not None:
            query, key = (RMSNorm(shape.head_size, shape.head_norm_eps, dtype=dtype, device=device) for _ in range(2))
            self._norms = {"q_norm.": query, "k_norm.": key}
            self._head_norm = HeadNorm(query.weight, key.weight, shape.head_norm_eps)

    def __call__(self, x: Tensor, norm: RMSNorm, step: StepContext, layer: int) -> Tensor:
        """The residual stream `x [T, H]`, which may be overwritten, plus the attention of its norm: `[T, H]`.

        Writes the layer's keys and values.
        """
        ops, inputs, cache = step.ops, step.inputs, step.caches[layer]
        qkv = self.qkv.after_norm(x, norm, ops)
        attended = ops.attention(
            qkv,
            inputs.positions,
            self._rotary,
            self._head_norm,
            cache,
            inputs.attention,
            self._num_heads,
            self._scale,
        )
        return self.output(attended.flatten(1), ops, residual=x)

    def destinations(self, prefix: str) -> Destinations:
        """Where the checkpoint's tensors belong."""
        norms: Iterator[Destinations] = (norm.destinations(prefix + name) for name, norm in self._norms.items())
        return chain(self.qkv.destinations(prefix), self.output.destinations(prefix), *norms)
