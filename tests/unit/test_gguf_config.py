"""GGUF metadata as the configs of `transformers`."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from omni_async.errors import CheckpointError, UnsupportedModel
from omni_async.loading.gguf.checkpoint import open_gguf
from omni_async.loading.gguf.config import llama3_divisors, make_config
from omni_async.loading.gguf.file import read_gguf
from tests.support.checkpoints import CONFIGS, GGUF_NAMES, gguf_metadata, save_gguf, tiny_config, write_gguf

COMPARED = (
    "architectures",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_parameters",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
    "hidden_act",
    "attention_bias",
    "head_dim",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "norm_topk_prob",
    "decoder_sparse_step",
    "mlp_only_layers",
    "use_sliding_window",
)


def config_of(tmp_path: Path, architecture: str = "llama", **changes: Any) -> PretrainedConfig:
    """The config of a file that holds little more than metadata; a change to `None` leaves the key out."""
    metadata = gguf_metadata(tiny_config()) | {key.replace("__", "."): value for key, value in changes.items()}
    tensors = {"token_embd.weight": np.zeros((258, 64), np.float32)}
    if "rope_freqs" in changes:
        tensors["rope_freqs.weight"] = metadata.pop("rope_freqs")
    given = {key: value for key, value in metadata.items() if value is not None}
    return make_config(read_gguf(write_gguf(tmp_path / "m.gguf", architecture, given, tensors)))


@pytest.mark.parametrize("architecture", CONFIGS)
def test_equal_to_the_config_that_was_written(architecture: str, tmp_path: Path) -> None:
    config = tiny_config(architecture, rms_norm_eps=2.0**-20)
    save_gguf(tmp_path / "m.gguf", config)
    expected, found = config.to_dict(), open_gguf(tmp_path / "m.gguf").config.to_dict()
    compared = [name for name in COMPARED if name in expected]
    assert {name: found[name] for name in compared} == {name: expected[name] for name in compared}


def test_heads_that_are_not_said(tmp_path: Path) -> None:
    config = config_of(
        tmp_path, attention__head_count_kv=None, attention__key_length=None, attention__value_length=None
    )
    assert (config.num_key_value_heads, config.head_dim) == (4, 16)


class TestRotation:
    def test_default(self, tmp_path: Path) -> None:
        config = config_of(tmp_path, rope__freq_base=5000.0, rope__dimension_count=16)
        assert config.rope_parameters == {"rope_type": "default", "rope_theta": 5000.0}

    def test_base_that_is_not_said(self, tmp_path: Path) -> None:
        assert config_of(tmp_path, rope__freq_base=None).rope_parameters["rope_theta"] == 10000.0

    @pytest.mark.parametrize("kind", ["linear", None])
    def test_linear(self, tmp_path: Path, kind: str | None) -> None:
        config = config_of(tmp_path, rope__scaling__type=kind, rope__scaling__factor=4.0)
        assert config.rope_parameters == {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}

    def test_none(self, tmp_path: Path) -> None:
        config = config_of(tmp_path, rope__scaling__type="none", rope__scaling__factor=4.0)
        assert config.rope_parameters["rope_type"] == "default"

    def test_yarn(self, tmp_path: Path) -> None:
        config = config_of(
            tmp_path,
            rope__scaling__type="yarn",
            rope__scaling__factor=4.0,
            rope__scaling__original_context_length=64,
            rope__scaling__yarn_beta_fast=16.0,
            rope__scaling__attn_factor=1.0,
        )
        assert config.rope_parameters == {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 16.0,
        }

    @pytest.mark.parametrize("factor", [8.0, 32.0])
    def test_llama3(self, tmp_path: Path, factor: float) -> None:
        """The divisors of a file give the frequencies that `transformers` makes of the config found."""
        divisors = llama3_divisors(500000.0, 16, factor).astype(np.float32)
        config = config_of(tmp_path, rope__freq_base=500000.0, rope_freqs=divisors)
        assert config.rope_parameters["rope_type"] == "llama3"
        assert config.rope_parameters["factor"] == factor
        frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        plain = 500000.0 ** -(torch.arange(0, 16, 2) / 16)
        torch.testing.assert_close(frequencies, plain / torch.from_numpy(divisors))

    @pytest.mark.parametrize(
        "divisors", [np.linspace(1, 8, 8, dtype=np.float32), np.ones(7, np.float32), np.ones(8, np.float16)]
    )
    def test_other_divisors(self, tmp_path: Path, divisors: np.ndarray) -> None:
        with pytest.raises(UnsupportedModel, match=r"rope_freqs\.weight"):
            config_of(tmp_path, rope_freqs=divisors)

    @pytest.mark.parametrize(
        "changes",
        [
            {"rope__scaling__type": "longrope"},
            {"rope__scaling__attn_factor": 1.5},
            {"rope__scaling__yarn_log_multiplier": 0.1},
            {"rope__scale_linear": 2.0},
            {"rope__dimension_count": 8},
        ],
    )
    def test_not_built_in(self, tmp_path: Path, changes: dict[str, object]) -> None:
        [key] = changes
        with pytest.raises(UnsupportedModel, match=key.replace("__", r"\.")):
            config_of(tmp_path, **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architecture": "mamba"}, r"'mamba' is not one of llama"),
        ({"attention__sliding_window": 512}, "sliding_window"),
        ({"expert_count": 8}, "8 experts"),
        ({"attention__value_length": 8}, "8 values and 16 keys"),
    ],
)
def test_not_built_in(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModel, match=rf"m\.gguf.*{words}"):
        config_of(tmp_path, **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"block_count": None}, r"llama\.block_count is missing"),
        ({"block_count": "two"}, r"llama\.block_count is a str, not int"),
        ({"attention__head_count": [4, 4]}, r"llama\.attention\.head_count is a list"),
        ({"attention__head_count": 0}, r"head_count must be at least 1"),
        ({"attention__head_count": 7, "attention__key_length": 16}, "no valid config"),
    ],
)
def test_senseless_metadata(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=rf"m\.gguf.*{words}"):
        config_of(tmp_path, **changes)


def test_the_embedding_is_missing(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", gguf_metadata(tiny_config()), {"output.weight": np.ones((2, 2))})
    with pytest.raises(CheckpointError, match=r"token_embd\.weight is missing"):
        open_gguf(path)


def test_recommended_sampling(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    save_gguf(path, tiny_config(), **{"general.sampling.temp": 0.5, "tokenizer.ggml.eot_token_id": 9})
    defaults = open_gguf(path).defaults
    assert (defaults.temperature, defaults.top_k, defaults.eos_token_ids) == (0.5, 0, (257, 9))


def test_the_names_of_all_families_are_tested() -> None:
    assert set(GGUF_NAMES) == set(CONFIGS)
