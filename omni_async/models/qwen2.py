"""Qwen2 and Qwen2.5: biases on queries, keys and values."""

import torch
from transformers import PretrainedConfig

from omni_async.models.layers.attention import AttentionShape
from omni_async.models.layers.causal_lm import CausalLM, require
from omni_async.models.layers.feed_forward import GatedMLP


class Qwen2ForCausalLM(CausalLM):
    """https://arxiv.org/abs/2407.10671."""

    def __init__(self, config: PretrainedConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        require(config, "use_sliding_window", False)
        attention = AttentionShape(
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            # Not a field of this family's config, but honoured where a checkpoint has it.
            head_size=config.to_dict().get("head_dim") or config.hidden_size // config.num_attention_heads,
            qkv_bias=True,
            output_bias=False,
        )

        def feed_forward(_: int) -> GatedMLP:
            return GatedMLP(config.hidden_size, config.intermediate_size, dtype=dtype, device=device)

        super().__init__(config, attention, feed_forward, dtype=dtype, device=device)
