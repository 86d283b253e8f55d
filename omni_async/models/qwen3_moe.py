"""Qwen3, sparse: mixtures of experts in most layers."""

import torch
from transformers import PretrainedConfig

from omni_async.models.layers.causal_lm import CausalLM
from omni_async.models.layers.feed_forward import FeedForward, GatedMLP, MixtureOfExperts
from omni_async.models.qwen3 import attention_shape


class Qwen3MoeForCausalLM(CausalLM):
    """https://arxiv.org/abs/2505.09388."""

    def __init__(self, config: PretrainedConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        # Released configs have this field, which the family's config class does not declare.
        head_size = config.to_dict().get("head_dim") or config.hidden_size // config.num_attention_heads

        def feed_forward(layer: int) -> FeedForward:
            if layer in config.mlp_only_layers or not config.num_experts or (layer + 1) % config.decoder_sparse_step:
                return GatedMLP(config.hidden_size, config.intermediate_size, dtype=dtype, device=device)
            return MixtureOfExperts(
                config.hidden_size,
                config.moe_intermediate_size,
                config.num_experts,
                config.num_experts_per_tok,
                renormalise=config.norm_topk_prob,
                dtype=dtype,
                device=device,
            )

        super().__init__(config, attention_shape(config, head_size), feed_forward, dtype=dtype, device=device)
