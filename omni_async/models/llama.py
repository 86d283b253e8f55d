"""Llama, and the many models that share its architecture."""

import torch
from transformers import PretrainedConfig

from omni_async.models.layers.attention import AttentionShape
from omni_async.models.layers.causal_lm import CausalLM
from omni_async.models.layers.feed_forward import GatedMLP


class LlamaForCausalLM(CausalLM):
    """https://arxiv.org/abs/2407.21783."""

    def __init__(self, config: PretrainedConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        attention = AttentionShape(
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_size=config.head_dim,
            qkv_bias=config.attention_bias,
            output_bias=config.attention_bias,
        )

        def feed_forward(_: int) -> GatedMLP:
            return GatedMLP(
                config.hidden_size, config.intermediate_size, bias=config.mlp_bias, dtype=dtype, device=device
            )

        super().__init__(config, attention, feed_forward, dtype=dtype, device=device)
