"""Qwen3, dense: norms on the heads of queries and keys."""

import torch
from transformers import PretrainedConfig

from omni_async.models.layers.attention import AttentionShape
from omni_async.models.layers.causal_lm import CausalLM, require
from omni_async.models.layers.feed_forward import GatedMLP


def attention_shape(config: PretrainedConfig, head_size: int) -> AttentionShape:
    """The attention that the dense and the sparse models share.

    Raises:
        UnsupportedModel: the config asks for a sliding window.
    """
    require(config, "use_sliding_window", False)
    return AttentionShape(
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_size=head_size,
        qkv_bias=config.attention_bias,
        output_bias=config.attention_bias,
        head_norm_eps=config.rms_norm_eps,
    )


class Qwen3ForCausalLM(CausalLM):
    """https://arxiv.org/abs/2505.09388."""

    def __init__(self, config: PretrainedConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        def feed_forward(_: int) -> GatedMLP:
            return GatedMLP(config.hidden_size, config.intermediate_size, dtype=dtype, device=device)

        super().__init__(config, attention_shape(config, config.head_dim), feed_forward, dtype=dtype, device=device)
