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
    """One layer; each of its blocks norms the residual stream for itself, and adds to it."""

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

    def __call__(self, x: Tensor, step: StepContext, layer: int) -> Tensor:
        """The residual stream `[T, H]`, which may be overwritten -> the same after the layer."""
        x = self.attention(x, self.input_norm, step, layer)
        return self.feed_forward(x, self.inner_norm, step.ops)

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
        """`[T, H]`, which may be overwritten -> `[T, H]`, normed."""
        for index, layer in enumerate(self.layers):
            x = layer(x, step, index)
        return self.norm(x, step.ops)

    def destinations(self, prefix: str) -> Destinations:
        """Where the checkpoint's tensors belong."""
        for index, layer in enumerate(self.layers):
            yield from layer.destinations(f"{prefix}layers.{index}.")
        yield from self.norm.destinations(f"{prefix}norm.")
