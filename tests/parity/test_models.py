"""The text models against `transformers`, on tiny random checkpoints, however the prompts are cut and batched."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from omni_async.backend.reference.ops import ReferenceOps
from omni_async.models.protocol import StageModel
from omni_async.models.registry import ARCHITECTURES
from tests.support.forward import Forward, Rows, chunked, generate, staggered, whole
from tests.support.tiny import SIZES, make_reference, reference_logits, saved_weights, token_ids

PROMPTS = [token_ids(length, 320, seed) for seed, length in enumerate((1, 15, 16, 17, 133))]
TOLERANCE = 1e-4


def rope(kind: str, **parameters: object) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **parameters}}


MOE = {"moe_intermediate_size": 48, "num_experts": 6, "num_experts_per_tok": 2}

CONFIGS: dict[str, PretrainedConfig] = {
    "llama-tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama-untied-biased": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama-one-key-head": LlamaConfig(**SIZES | {"num_key_value_heads": 1}),
    "llama-no-groups": LlamaConfig(**SIZES | {"num_key_value_heads": 4, "num_hidden_layers": 2}),
    "llama-wide-heads": LlamaConfig(**SIZES, head_dim=24),
    "llama-linear": LlamaConfig(**SIZES, **rope("linear", factor=2.5)),
    "llama-dynamic": LlamaConfig(**SIZES, **rope("dynamic", factor=2.0)),
    "llama-yarn": LlamaConfig(**SIZES, **rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    "llama-llama3": LlamaConfig(
        **SIZES,
        **rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64),
    ),
    "llama-old-names": LlamaConfig(**SIZES, rope_theta=5e4, rope_scaling={"type": "linear", "factor": 2.0}),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen2-yarn": Qwen2Config(
        **SIZES, **rope("yarn", factor=2.0, original_max_position_embeddings=128, mscale=0.7, mscale_all_dim=1.0)
    ),
    "qwen3": Qwen3Config(**SIZES, head_dim=32),
    "qwen3-tied-biased": Qwen3Config(**SIZES, head_dim=16, attention_bias=True, tie_word_embeddings=True),
    "moe": Qwen3MoeConfig(**SIZES, **MOE, head_dim=16, norm_topk_prob=True),
    "moe-unnormalised": Qwen3MoeConfig(**SIZES, **MOE, norm_topk_prob=False),
    "moe-some-dense": Qwen3MoeConfig(**SIZES, **MOE, head_dim=16, mlp_only_layers=[0], norm_topk_prob=True),
    "moe-every-second": Qwen3MoeConfig(**SIZES, **MOE, head_dim=16, decoder_sparse_step=2, norm_topk_prob=True),
}


class Pair:
    """A model of `transformers`, and ours with its weights."""

    def __init__(self, name: str, folder: Any) -> None:
        self.config = CONFIGS[name]
        self.reference = make_reference(self.config)
        architecture = type(self.reference).__name__
        self.model: StageModel = ARCHITECTURES[architecture](
            self.config, dtype=torch.float32, device=torch.device("cpu")
        )
        self.model.load(saved_weights(self.reference, folder))
        self.expected = [reference_logits(self.reference, ids) for ids in PROMPTS]


@pytest.fixture(scope="module", params=list(CONFIGS))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(request.param, tmp_path_factory.mktemp("checkpoint"))


LENGTHS = [len(prompt) for prompt in PROMPTS]
ALONE: list[Rows] = [[(slot, length)] for slot, length in enumerate(LENGTHS)]


@pytest.mark.parametrize(
    "steps",
    [ALONE, whole(LENGTHS), chunked(LENGTHS, 7), chunked(LENGTHS, 16), staggered(LENGTHS, 9), chunked(LENGTHS, 1)],
    ids=["alone", "together", "chunks of 7", "chunks of 16", "mixed", "token by token"],
)
def test_logits_equal(pair: Pair, steps: list[Rows]) -> None:
    forward = Forward(pair.model, ReferenceOps(), PROMPTS)
    for logits, expected in zip(forward.run(steps), pair.expected, strict=True):
        torch.testing.assert_close(logits, expected, rtol=0, atol=TOLERANCE)


def test_greedy_ids_equal(pair: Pair) -> None:
    prompts = PROMPTS[1:4]
    answers = generate(pair.model, ReferenceOps(), prompts, 64)
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([prompt])
        expected = pair.reference.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=64, do_sample=False, pad_token_id=0
        )
        assert answer == expected[0, len(prompt) :].tolist()
    assert len(set().union(*answers)) >= 8


def test_spec(pair: Pair) -> None:
    spec = pair.model.spec
    assert (spec.hidden_size, spec.vocab_size) == (64, 320)
    assert spec.max_positions == (1024 if pair.config.rope_parameters["rope_type"] == "dynamic" else 512)
    assert spec.cache.num_layers == pair.config.num_hidden_layers
    assert spec.cache.num_kv_heads == pair.config.num_key_value_heads


@pytest.mark.parametrize("name", ["llama-tied", "qwen2", "qwen3", "moe"])
@pytest.mark.parametrize("layer", [0, 2])
def test_comparison_sees_one_changed_matrix(name: str, layer: int, tmp_path: Any) -> None:
    pair = Pair(name, tmp_path)
    with torch.no_grad():
        pair.reference.model.layers[layer].self_attn.o_proj.weight[0] *= 1.1
    changed = reference_logits(pair.reference, PROMPTS[1])
    logits = Forward(pair.model, ReferenceOps(), [PROMPTS[1]]).run(whole([15]))[0]
    assert (logits - pair.expected[1]).abs().max() < TOLERANCE
    assert (logits - changed).abs().max() > 10 * TOLERANCE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["llama-untied-biased", "qwen3-tied-biased", "moe-some-dense"])
def test_half_precision_is_as_close_as_the_reference(name: str, dtype: torch.dtype, tmp_path: Any) -> None:
    pair = Pair(name, tmp_path)
    exact = pair.expected[4]
    model = ARCHITECTURES[type(pair.reference).__name__](pair.config, dtype=dtype, device=torch.device("cpu"))
    model.load(saved_weights(pair.reference, tmp_path))
    logits = Forward(model, ReferenceOps(), PROMPTS, dtype=dtype).run(staggered(LENGTHS, 9))[4]
    assert logits.dtype == dtype
    error = (logits - exact).abs().mean()
    usual = (reference_logits(pair.reference.to(dtype), PROMPTS[4]) - exact).abs().mean()
    assert error < 1.2 * usual
