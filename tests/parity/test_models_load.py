"""What a model makes of its checkpoint's tensors and config."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from omni_async.backend.reference.ops import ReferenceOps
from omni_async.errors import CheckpointError, UnsupportedModel
from omni_async.models.layers import weights as weights_module
from omni_async.models.layers.causal_lm import CausalLM
from omni_async.models.layers.weights import Tie, load_weights
from omni_async.models.llama import LlamaForCausalLM
from omni_async.models.registry import ARCHITECTURES
from tests.support.forward import Forward, whole
from tests.support.tiny import SIZES, TensorWeight, make_reference, reference_logits, saved_weights, token_ids

CPU = torch.device("cpu")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
IDS = token_ids(20, 320)

Weights = list[TensorWeight]


@pytest.fixture
def tied(tmp_path: Any) -> tuple[LlamaForCausalLM, Weights, Any]:
    """A model with a tied head, the tensors of its checkpoint, and the reference."""
    config = LlamaConfig(**SIZES, tie_word_embeddings=True)
    reference = make_reference(config)
    return LlamaForCausalLM(config, dtype=torch.float32, device=CPU), saved_weights(reference, tmp_path), reference


def logits_of(model: CausalLM) -> torch.Tensor:
    return Forward(model, ReferenceOps(), [IDS]).run(whole([len(IDS)]))[0]


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
        LlamaConfig(**SIZES, tie_word_embeddings=True),
        Qwen2Config(**SIZES),
        Qwen3Config(**SIZES, attention_bias=True),
        Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, mlp_only_layers=[1], moe_intermediate_size=32),
    ],
    ids=lambda config: config.model_type,
)
def test_every_parameter_is_written(config: PretrainedConfig, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    allocated: list[torch.Tensor] = []

    def poisoned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def allocate(*args: Any, **kwargs: Any) -> torch.Tensor:
            allocated.append(make(*args, **kwargs).fill_(torch.nan))
            return allocated[-1]

        return allocate

    reference = make_reference(config)
    weights = saved_weights(reference, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", poisoned(torch.empty))
        patch.setattr(torch, "empty_like", poisoned(torch.empty_like))
        model = ARCHITECTURES[type(reference).__name__](config, dtype=torch.float32, device=CPU)
    model.load(weights)
    assert sum(tensor.numel() for tensor in allocated) == reference.num_parameters()
    assert all(tensor.isfinite().all() for tensor in allocated)


@pytest.mark.parametrize("place", [0, None], ids=["head first", "head last"])
def test_stored_copy_of_a_tied_head(tied: tuple[LlamaForCausalLM, Weights, Any], place: int | None) -> None:
    model, weights, reference = tied
    table = next(weight.tensor for weight in weights if weight.name == EMBEDDING)
    weights.insert(len(weights) if place is None else place, TensorWeight(HEAD, table.clone()))
    model.load(weights)
    assert model.head.data_ptr() == model.embedding.data_ptr()
    torch.testing.assert_close(logits_of(model), reference_logits(reference, IDS), rtol=0, atol=1e-4)


@pytest.mark.parametrize("place", [0, None], ids=["head first", "head last"])
@pytest.mark.parametrize("row", [0, 319])
def test_other_tensor_stored_as_a_tied_head(
    tied: tuple[LlamaForCausalLM, Weights, Any], place: int | None, row: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_module, "COMPARED_BYTES", 7 * 64 * 4)
    model, weights, reference = tied
    table = next(weight.tensor for weight in weights if weight.name == EMBEDDING).clone()
    table[row, 5] += 1
    weights.insert(len(weights) if place is None else place, TensorWeight(HEAD, table))
    with pytest.warns(UserWarning, match=r"lm_head\.weight differs from model\.embed_tokens\.weight.* is used"):
        model.load(weights)
    assert model.head.data_ptr() == model.embedding.data_ptr()
    torch.testing.assert_close(logits_of(model), reference_logits(reference, IDS), rtol=0, atol=1e-4)


def test_tied_embedding_itself_must_be_there(tied: tuple[LlamaForCausalLM, Weights, Any]) -> None:
    model, weights, _ = tied
    renamed = [TensorWeight(HEAD, w.tensor) if w.name == EMBEDDING else w for w in weights]
    with pytest.raises(CheckpointError, match=rf"model.safetensors: missing tensor {EMBEDDING}"):
        model.load(renamed)


def test_untied_models_have_their_own_head(tmp_path: Any) -> None:
    config = LlamaConfig(**SIZES)
    model = LlamaForCausalLM(config, dtype=torch.float32, device=CPU)
    weights = saved_weights(make_reference(config), tmp_path)
    assert model.head.data_ptr() != model.embedding.data_ptr()
    with pytest.raises(CheckpointError, match=r"missing tensor lm_head\.weight"):
        model.load(weight for weight in weights if weight.name != HEAD)


def test_old_rotation_tables_are_ignored(tied: tuple[LlamaForCausalLM, Weights, Any]) -> None:
    model, weights, reference = tied
    model.load([TensorWeight("model.layers.0.self_attn.rotary_emb.inv_freq", torch.zeros(8)), *weights])
    torch.testing.assert_close(logits_of(model), reference_logits(reference, IDS), rtol=0, atol=1e-4)


def test_missing_tensors_are_named(tied: tuple[LlamaForCausalLM, Weights, Any]) -> None:
    model, weights, _ = tied
    with pytest.raises(CheckpointError, match=r"missing tensors model\.layers\.2\.input_layernorm.* and 5 more"):
        model.load(weight for weight in weights if "layers.2" not in weight.name)


def test_empty_checkpoint_is_refused(tied: tuple[LlamaForCausalLM, Weights, Any]) -> None:
    with pytest.raises(CheckpointError, match="the checkpoint: missing tensors"):
        tied[0].load([])


def test_unexpected_tensor_is_refused(tied: tuple[LlamaForCausalLM, Weights, Any]) -> None:
    model, weights, _ = tied
    extra = TensorWeight("model.layers.7.mlp.up_proj.weight", torch.zeros(96, 64), "model-2.safetensors")
    with pytest.raises(CheckpointError, match=r"model-2\.safetensors: unexpected tensor model\.layers\.7\.mlp"):
        model.load([*weights, extra])


@pytest.mark.parametrize("name", ["model.norm.weight", EMBEDDING])
def test_repeated_tensor_is_refused(tied: tuple[LlamaForCausalLM, Weights, Any], name: str) -> None:
    model, weights, _ = tied
    again = next(weight for weight in weights if weight.name == name)
    repeated = TensorWeight(name, again.tensor, "other.safetensors")
    with pytest.raises(CheckpointError, match=rf"other\.safetensors: tensor {name} is already loaded from model\."):
        model.load([*weights, repeated])


@pytest.mark.parametrize("name", ["model.layers.1.self_attn.k_proj.weight", HEAD])
def test_misshapen_tensor_is_refused(tied: tuple[LlamaForCausalLM, Weights, Any], name: str) -> None:
    model, weights, _ = tied
    wrong = TensorWeight(name, torch.zeros(31, 64))
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: tensor {name} has shape \[31, 64\], .* \[\d+, 64"):
        model.load([wrong, *(weight for weight in weights if weight.name != name)])


def test_tensors_take_the_run_dtype() -> None:
    place = torch.empty(3, dtype=torch.bfloat16)
    load_weights(iter([("a", place)]), [TensorWeight("a", torch.tensor([1.0, 2.5, -3.0]))])
    assert place.tolist() == [1.0, 2.5, -3.0]


def test_equal_ties_do_not_warn() -> None:
    place = torch.empty(3, 2)
    table = torch.arange(6.0).view(3, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_weights(iter([("a", place)]), [TensorWeight("b", table), TensorWeight("a", table)], Tie("a", "b"))
    assert torch.equal(place, table)


@pytest.mark.parametrize(
    ("architecture", "config", "message"),
    [
        ("LlamaForCausalLM", LlamaConfig(**SIZES, hidden_act="gelu"), "llama: hidden_act='gelu' is not supported"),
        (
            "LlamaForCausalLM",
            LlamaConfig(**SIZES | {"num_key_value_heads": 3}),
            r"num_attention_heads \(4\) is not a multiple of num_key_value_heads \(3\)",
        ),
        (
            "Qwen2ForCausalLM",
            Qwen2Config(**SIZES, use_sliding_window=True),
            "qwen2: use_sliding_window=True is not supported, only False",
        ),
        ("Qwen3ForCausalLM", Qwen3Config(**SIZES, use_sliding_window=True), "qwen3: use_sliding_window=True"),
        ("Qwen3MoeForCausalLM", Qwen3MoeConfig(**SIZES, use_sliding_window=True), "qwen3_moe: use_sliding_window=True"),
        (
            "LlamaForCausalLM",
            LlamaConfig(
                **SIZES,
                rope_parameters={
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "short_factor": [1.0] * 8,
                    "long_factor": [2.0] * 8,
                    "original_max_position_embeddings": 64,
                },
            ),
            "rope_type='longrope' is not supported",
        ),
    ],
)
def test_what_is_not_built_in_is_refused(architecture: str, config: PretrainedConfig, message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        ARCHITECTURES[architecture](config, dtype=torch.float32, device=CPU)
