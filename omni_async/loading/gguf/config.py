"""The metadata of a GGUF file as the config that `transformers` would have for the same model."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType
from huggingface_hub.errors import StrictDataclassError
from numpy.typing import NDArray
from transformers import LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from omni_async.errors import CheckpointError, UnsupportedModel
from omni_async.loading.gguf.file import GGUFFile

EMBEDDING = "token_embd.weight"
HEAD = "output.weight"
ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True, slots=True)
class Family:
    """What llama.cpp's name of an architecture stands for."""

    config: type[PretrainedConfig]
    architecture: str
    permuted: bool = False
    """The rows of queries and keys are stored in another order."""


FAMILIES: Mapping[str, Family] = {
    "llama": Family(LlamaConfig, "LlamaForCausalLM", permuted=True),
    "qwen2": Family(Qwen2Config, "Qwen2ForCausalLM"),
    "qwen3": Family(Qwen3Config, "Qwen3ForCausalLM"),
    "qwen3moe": Family(Qwen3MoeConfig, "Qwen3MoeForCausalLM"),
}

NEUTRAL_ROPE: Mapping[str, object] = {
    "scaling.attn_factor": 1.0,
    "scaling.yarn_attn_factor": 1.0,
    "scaling.yarn_ext_factor": 1.0,
}
"""Settings that are not built in, at the values that change nothing."""

KNOWN_ROPE = {
    "dimension_count",
    "freq_base",
    "scaling.type",
    "scaling.factor",
    "scaling.original_context_length",
    "scaling.finetuned",
    "scaling.yarn_beta_fast",
    "scaling.yarn_beta_slow",
}

LLAMA3_ROPE: Mapping[str, float] = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""https://huggingface.co/meta-llama/Llama-3.1-8B/blob/main/config.json."""


def make_config(file: GGUFFile) -> PretrainedConfig:
    """The model's config.

    Raises:
        CheckpointError: metadata is missing or makes no sense.
        UnsupportedModel: the architecture, or something that the file asks of it, is not built in.
    """
    name = file.require("general.architecture", str)
    family = FAMILIES.get(name)
    if family is None:
        raise UnsupportedModel(f"{file.path}: architecture {name!r} is not one of {', '.join(FAMILIES)}")
    if (file.get("split.count", int) or 1) > 1:
        raise UnsupportedModel(f"{file.path}: one of several parts; merge them with `llama-gguf-split --merge`")
    if file.get(f"{name}.attention.sliding_window", int):
        raise UnsupportedModel(f"{file.path}: {name}.attention.sliding_window is not built in")
    if EMBEDDING not in file.tensors:
        raise CheckpointError(f"{file.path}: tensor {EMBEDDING} is missing")
    num_heads = file.require(f"{name}.attention.head_count", int)
    hidden_size = file.require(f"{name}.embedding_length", int)
    if num_heads < 1:
        raise CheckpointError(f"{file.path}: {name}.attention.head_count must be at least 1, got {num_heads}")
    head_size = file.get(f"{name}.attention.key_length", int) or hidden_size // num_heads
    value_size = file.get(f"{name}.attention.value_length", int) or head_size
    if value_size != head_size:
        raise UnsupportedModel(f"{file.path}: heads of {value_size} values and {head_size} keys; they must be equal")
    fields: dict[str, Any] = {
        "architectures": [family.architecture],
        "vocab_size": file.tensors[EMBEDDING].shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": file.require(f"{name}.feed_forward_length", int),
        "num_hidden_layers": file.require(f"{name}.block_count", int),
        "num_attention_heads": num_heads,
        "num_key_value_heads": file.get(f"{name}.attention.head_count_kv", int) or num_heads,
        "head_dim": head_size,
        "max_position_embeddings": file.require(f"{name}.context_length", int),
        "rms_norm_eps": file.require(f"{name}.attention.layer_norm_rms_epsilon", float),
        "rope_parameters": _rope_parameters(file, name, head_size),
        "tie_word_embeddings": HEAD not in file.tensors,
        "bos_token_id": file.get("tokenizer.ggml.bos_token_id", int),
        "eos_token_id": file.get("tokenizer.ggml.eos_token_id", int),
    }
    if family.config is not Qwen2Config:  # whose biases are fixed
        fields["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    if family.config is LlamaConfig:
        fields["mlp_bias"] = "blk.0.ffn_gate.bias" in file.tensors
    fields |= _expert_fields(file, name, family)
    try:
        return family.config(**fields)
    except (ValueError, TypeError, KeyError, ArithmeticError, StrictDataclassError) as error:
        raise CheckpointError(f"{file.path}: its metadata makes no valid config: {error}") from error


def _expert_fields(file: GGUFFile, name: str, family: Family) -> dict[str, object]:
    count = file.get(f"{name}.expert_count", int) or 0
    if family.config is not Qwen3MoeConfig:
        if count:
            raise UnsupportedModel(f"{file.path}: {name} with {count} experts is not built in")
        return {}
    return {
        "num_experts": count,
        "num_experts_per_tok": file.require(f"{name}.expert_used_count", int),
        "moe_intermediate_size": file.require(f"{name}.expert_feed_forward_length", int),
        "norm_topk_prob": True,  # the format has no field for it: llama.cpp always does
    }


def _rope_parameters(file: GGUFFile, name: str, head_size: int) -> dict[str, object]:
    """The rotation of queries and keys, in the form of `PretrainedConfig.rope_parameters`."""
    prefix = f"{name}.rope."
    for key, value in file.metadata.items():
        setting = key.removeprefix(prefix)
        if setting != key and setting not in KNOWN_ROPE and value != NEUTRAL_ROPE.get(setting):
            raise UnsupportedModel(f"{file.path}: {key}={value!r} is not built in")
    rotated = file.get(f"{prefix}dimension_count", int)
    if rotated not in (None, head_size):
        raise UnsupportedModel(
            f"{file.path}: {prefix}dimension_count={rotated} of heads of {head_size} is not built in"
        )
    theta = file.get(f"{prefix}freq_base", float) or 10000.0
    factor = file.get(f"{prefix}scaling.factor", float) or 1.0
    # As in llama.cpp, a factor without a type is a linear one.
    kind = file.get(f"{prefix}scaling.type", str) or "linear"
    if ROPE_FACTORS in file.tensors:
        if kind != "none" and factor != 1.0:
            raise UnsupportedModel(f"{file.path}: {ROPE_FACTORS} together with {kind} scaling is not built in")
        return {
            "rope_type": "llama3",
            "rope_theta": theta,
            **LLAMA3_ROPE,
            "factor": _llama3_factor(file, theta, head_size),
        }
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return {"rope_type": "default", "rope_theta": theta}
    if kind == "linear":
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    if kind != "yarn":
        raise UnsupportedModel(f"{file.path}: {prefix}scaling.type={kind!r} is not one of none, linear, yarn")
    trained = file.get(f"{prefix}scaling.original_context_length", int) or file.require(f"{name}.context_length", int)
    betas = {beta: file.get(f"{prefix}scaling.yarn_{beta}", float) for beta in ("beta_fast", "beta_slow")}
    return {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": factor,
        "original_max_position_embeddings": trained,
        **{name: beta for name, beta in betas.items() if beta is not None},
    }


def _llama3_factor(file: GGUFFile, theta: float, head_size: int) -> float:
    """The factor of "llama3" scaling, of which a file holds only the outcome: a divisor for each frequency.

    Raises:
        UnsupportedModel: no factor gives these divisors.
    """
    tensor = file.tensors[ROPE_FACTORS]
    if tensor.type == GGMLQuantizationType.F32 and tensor.shape == (head_size // 2,):
        divisors = tensor.data.view(np.float32)
        factor = float(divisors.max())
        if np.allclose(divisors, llama3_divisors(theta, head_size, factor), rtol=1e-4):
            return factor
    raise UnsupportedModel(f"{file.path}: tensor {ROPE_FACTORS} is not the scaling of Llama 3.1")


def llama3_divisors(theta: float, head_size: int, factor: float) -> NDArray[np.float64]:
    """What "llama3" scaling divides each frequency by, `[head_size / 2]`.

    Source: https://github.com/meta-llama/llama-models/blob/main/models/llama3/model.py, `apply_scaling`.
    """
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_size, 2) / head_size)
    low, high = LLAMA3_ROPE["low_freq_factor"], LLAMA3_ROPE["high_freq_factor"]
    unscaled = (LLAMA3_ROPE["original_max_position_embeddings"] / wavelengths - low) / (high - low)
    share = np.clip(unscaled, 0, 1)
    divisors: NDArray[np.float64] = 1 / ((1 - share) / factor + share)
    return divisors
