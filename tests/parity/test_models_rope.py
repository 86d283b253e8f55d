"""Rotation tables against those of `transformers`."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from omni_async.backend.reference.ops import ReferenceOps
from omni_async.errors import UnsupportedModel
from omni_async.models.layers.rope import make_rotary
from omni_async.models.registry import ARCHITECTURES
from tests.support.forward import Forward, chunked
from tests.support.tiny import SIZES, make_reference, saved_weights, token_ids

CPU = torch.device("cpu")

KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "yarn with scales": {
        "factor": 8.0, "original_max_position_embeddings": 64, "mscale": 0.5, "mscale_all_dim": 0.8, "beta_fast": 16,
        "beta_slow": 2, "truncate": False,
    },
    "yarn with a factor of attention": {"factor": 2.0, "original_max_position_embeddings": 64, "attention_factor": 0.7},
    "llama3": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64
    },
}  # fmt: skip


def config_of(kind: str, max_positions: int = 256, **more: Any) -> LlamaConfig:
    parameters = {"rope_type": kind.split()[0], "rope_theta": 5e3, **KINDS[kind], **more}
    return LlamaConfig(**SIZES | {"max_position_embeddings": max_positions}, rope_parameters=parameters)


@pytest.mark.parametrize("kind", KINDS)
def test_tables_equal(kind: str) -> None:
    config = config_of(kind)
    rotary = make_rotary(config, 16, CPU)
    cos, sin = LlamaRotaryEmbedding(config)(torch.empty(0), torch.arange(256)[None])
    assert rotary.rotary_dim == 16
    torch.testing.assert_close(rotary.cos[:256], cos[0, :, :8], rtol=0, atol=1e-6)
    torch.testing.assert_close(rotary.sin[:256], sin[0, :, :8], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "positions"), [("default", 256), ("linear", 256), ("dynamic", 1024), ("yarn", 256), ("llama3", 256)]
)
def test_positions_covered(kind: str, positions: int) -> None:
    assert len(make_rotary(config_of(kind), 16, CPU).cos) == positions


def test_yarn_covers_what_it_extends_to() -> None:
    assert len(make_rotary(config_of("yarn", max_positions=64), 16, CPU).cos) == 256


def test_part_of_a_head_may_be_rotated() -> None:
    rotary = make_rotary(config_of("default", partial_rotary_factor=0.5), 16, CPU)
    assert rotary.rotary_dim == 8
    expected = torch.outer(torch.arange(256.0), 5e3 ** -torch.arange(0, 1, 0.25))
    torch.testing.assert_close(rotary.sin, expected.sin(), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("section", "interleaved", "axes"),
    [
        (None, False, None),
        ([2, 3, 3], False, [0, 0, 1, 1, 1, 2, 2, 2]),
        ([4, 2, 2], True, [0, 1, 2, 0, 1, 2, 0, 0]),
        ([2, 3, 3], True, [0, 1, 2, 0, 1, 2, 0, 1]),
        ([6, 1, 1], True, [0, 1, 2, 0, 0, 0, 0, 0]),
    ],
)
def test_axes_of_pairs(section: list[int] | None, interleaved: bool, axes: list[int] | None) -> None:
    more: dict[str, Any] = {} if section is None else {"mrope_section": section, "mrope_interleaved": interleaved}
    found = make_rotary(config_of("default", **more), 16, CPU).axes
    assert (None if found is None else found.tolist()) == axes
    assert found is None or found.dtype is torch.int32


@pytest.mark.parametrize("section", [[2, 3, 2], [16, 24, 24]])
def test_axes_must_share_out_all_pairs(section: list[int]) -> None:
    with pytest.raises(UnsupportedModel, match="mrope_section=.* does not share out 8 pairs"):
        make_rotary(config_of("default", mrope_section=section), 16, CPU)


def test_unknown_kind_is_refused() -> None:
    config = config_of("default")
    config.rope_parameters["rope_type"] = "spiral"
    with pytest.raises(UnsupportedModel, match="llama: rope_type='spiral' is not supported"):
        make_rotary(config, 16, CPU)


@torch.inference_mode()
def test_dynamic_rotation_follows_a_growing_sequence(tmp_path: Any) -> None:
    config = config_of("dynamic", max_positions=48)
    reference = make_reference(config)
    model = ARCHITECTURES["LlamaForCausalLM"](config, dtype=torch.float32, device=CPU)
    model.load(saved_weights(reference, tmp_path))
    ids = token_ids(120, 320)
    known = reference(input_ids=torch.tensor([ids[:40]]), use_cache=True)
    expected = [known.logits[0]]
    for token in ids[40:]:
        known = reference(input_ids=torch.tensor([[token]]), past_key_values=known.past_key_values)
        expected.append(known.logits[0])
    for size in (1, 50, 120):
        logits = Forward(model, ReferenceOps(), [ids]).run(chunked([120], size))[0]
        torch.testing.assert_close(logits, torch.cat(expected), rtol=0, atol=1e-4)
