"""A stack of pre-norm decoder layers: attention and feed-forward, each added to the residual stream."""

from collections.abc import Callable

import torch
from torch import Tensor

from omni_async.backend.ops import Rotary, StepContext
from omni_async.models.layers.attention import Attention, AttentionShape
from omni_async.models.layers.feed_forward import FeedForward
from omni_async.models.layers.norm import RMSNorm
from omni_async.models.layers.weights import Destinations


class DecoderLayer:
    """One layer. What a block computes is added to the residual stream at the norm before the next block."""

    def __init__(
        self,
        hidden_size: int,
        norm_eps: float,
        attention: Attention,
        feed_forward: FeedForward,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.input_norm = RMSNorm(hidden_size, norm_eps, dtype=dtype, device=device)
        self.attention = attention
        self.inner_norm = RMSNorm(hidden_size, norm_eps, dtype=dtype, device=device)
        self.feed_forward = feed_forward

    def __call__(self, x: Tensor, residual: Tensor | None, step: StepContext, layer: int) -> tuple[Tensor, Tensor]:
        """What is to be added `[T, H]` and the residual stream, before the layer -> the same after it."""
        x, residual = self.attention(x, residual, self.input_norm, step, layer)
        return self.feed_forward(x, residual, self.inner_norm, step.ops)

    def destinations(self, prefix: str) -> Destinations:
        """Where the checkpoint's tensors belong."""
        yield from self.input_norm.destinations(f"{prefix}input_layernorm.")
        yield from self.attention.destinations(f"{prefix}self_attn.")
        yield from self.inner_norm.destinations(f"{prefix}post_attention_layernorm.")
        yield from self.feed_forward.destinations(f"{prefix}mlp.")


class Decoder:
    """The layers and the norm after the last."""

    def __init__(
        self,
        num_layers: int,
        hidden_size: int,
        norm_eps: float,
        attention: AttentionShape,
        rotary: Rotary,
        feed_forward: Callable[[int], FeedForward],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layers = [
            DecoderLayer(
                hidden_size,
                norm_eps,
                Attention(hidden_size, attention, rotary, dtype=dtype, device=device),
                feed_forward(layer),
                dtype=dtype,
                device=device,
            )
            for layer in range(num_layers)
        ]
        self.norm = RMSNorm(hidden_size, norm_eps, dtype=dtype, device=device)

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """`[T, H]` -> `[T, H]`, normed."""
        residual: Tensor | None = None
        for index, layer in enumerate(self.layers):
            x, residual = layer(x, residual, step, index)
        if residual is None:
            raise ValueError("a decoder has at least one layer")
        x, _ = self.norm(x, residual, step.ops)
        return x

    def destinations(self, prefix: str) -> Destinations:
        """Where the checkpoint's tensors belong."""
        for index, layer in enumerate(self.layers):
            yield from layer.destinations(f"{prefix}layers.{index}.")
        yield from self.norm.destinations(f"{prefix}norm.")
