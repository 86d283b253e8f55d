"""Shapes of released text models, and the least time that a device needs for a step of one.

The limit of a step is the sum of two phases: the matrix products with the weights, and attention over the cache. A
phase takes the longer of its bytes at the copy bandwidth and its operations at the matrix rate.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from omni_async.measure.ceilings import Ceilings

ITEM = 2
"""Bytes of a bfloat16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of a decoder-only model of gated feed-forward blocks, dense or with experts, run in bfloat16."""

    architecture: str
    model_type: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    """Of the dense block, or of one expert."""
    num_heads: int
    num_kv_heads: int
    head_size: int = 128
    vocab_size: int = 151936
    tied: bool = False
    num_experts: int = 0
    """0: the blocks are dense."""
    top_k: int = 0
    max_positions: int = 40960

    def config(self) -> dict[str, object]:
        """What `config.json` says of it."""
        common: dict[str, object] = {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "num_hidden_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_size,
            "vocab_size": self.vocab_size,
            "tie_word_embeddings": self.tied,
            "max_position_embeddings": self.max_positions,
            "rope_theta": 1_000_000.0,
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
            "attention_bias": False,
            "use_sliding_window": False,
            "dtype": "bfloat16",
        }
        if not self.num_experts:
            return common
        return common | {
            "intermediate_size": self.top_k * self.intermediate_size,  # of dense layers; there are none
            "moe_intermediate_size": self.intermediate_size,
            "num_experts": self.num_experts,
            "num_experts_per_tok": self.top_k,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }

    @property
    def attention_weights(self) -> int:
        """Elements of one layer's attention matrices."""
        return self.hidden_size * self.head_size * 2 * (self.num_heads + self.num_kv_heads)

    @property
    def block_weights(self) -> int:
        """Elements of one gated block, or of one expert."""
        return 3 * self.hidden_size * self.intermediate_size

    @property
    def router_weights(self) -> int:
        """Elements of one layer's router."""
        return self.hidden_size * self.num_experts

    @property
    def head_weights(self) -> int:
        """Elements of the head; a step reads only a few rows of the embedding."""
        return self.vocab_size * self.hidden_size

    def touched_blocks(self, num_tokens: int) -> float:
        """Blocks of a layer that a step reads: of E experts, k taken by each token at random, E (1 - (1 - k / E)^T)."""
        if not self.num_experts:
            return 1.0
        return self.num_experts * (1 - (1 - self.top_k / self.num_experts) ** num_tokens)

    def weight_bytes(self, num_tokens: int) -> float:
        """Bytes of weights that a step of so many tokens reads."""
        layer = self.attention_weights + self.router_weights + self.touched_blocks(num_tokens) * self.block_weights
        return ITEM * (self.num_layers * layer + self.head_weights)

    def matrix_flops(self, num_tokens: int, num_sampled: int) -> float:
        """Operations of the products with weights."""
        blocks = self.top_k if self.num_experts else 1
        layer = self.attention_weights + self.router_weights + blocks * self.block_weights
        return 2.0 * (num_tokens * self.num_layers * layer + num_sampled * self.head_weights)

    def cache_bytes(self, num_positions: int) -> int:
        """Bytes of keys and values of so many positions, in all layers."""
        return ITEM * 2 * self.num_layers * self.num_kv_heads * self.head_size * num_positions

    def attention_flops(self, num_pairs: float) -> float:
        """Operations of the scores and of the weighted sums for so many pairs of a query and a key."""
        return 4.0 * self.num_layers * self.num_heads * self.head_size * num_pairs

    def decode_limit_s(self, batch: int, context: int, ceilings: Ceilings) -> float:
        """The least time of a step in which each of `batch` rows, each with `context` positions, gains a token."""
        positions = batch * context
        matrices = ceilings.seconds(self.weight_bytes(batch), self.matrix_flops(batch, batch))
        return matrices + ceilings.seconds(self.cache_bytes(positions), self.attention_flops(positions))

    def prompt_limit_s(self, length: int, ceilings: Ceilings) -> float:
        """The least time from a prompt to its first token."""
        matrices = ceilings.seconds(self.weight_bytes(length), self.matrix_flops(length, 1))
        pairs = length * (length + 1) / 2
        return matrices + ceilings.seconds(self.cache_bytes(length), self.attention_flops(pairs))


SHAPES: Mapping[str, Shape] = {
    # https://huggingface.co/Qwen/Qwen3-0.6B/blob/main/config.json
    "Qwen3-0.6B": Shape(
        architecture="Qwen3ForCausalLM",
        model_type="qwen3",
        num_layers=28,
        hidden_size=1024,
        intermediate_size=3072,
        num_heads=16,
        num_kv_heads=8,
        tied=True,
    ),
    # https://huggingface.co/Qwen/Qwen3-8B/blob/main/config.json
    "Qwen3-8B": Shape(
        architecture="Qwen3ForCausalLM",
        model_type="qwen3",
        num_layers=36,
        hidden_size=4096,
        intermediate_size=12288,
        num_heads=32,
        num_kv_heads=8,
    ),
    # https://huggingface.co/Qwen/Qwen3-30B-A3B/blob/main/config.json
    "Qwen3-30B-A3B": Shape(
        architecture="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        num_layers=48,
        hidden_size=2048,
        intermediate_size=768,
        num_heads=32,
        num_kv_heads=4,
        num_experts=128,
        top_k=8,
    ),
}
