"""Tiny checkpoints of random weights, as folders and as GGUF files."""

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import (
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tests.support.tiny import make_reference

BOS, EOS = 256, 257
VOCAB_SIZE = 258
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)

CONFIGS: Mapping[str, type[PretrainedConfig]] = {
    "LlamaForCausalLM": LlamaConfig,
    "Qwen2ForCausalLM": Qwen2Config,
    "Qwen3ForCausalLM": Qwen3Config,
    "Qwen3MoeForCausalLM": Qwen3MoeConfig,
}
GGUF_NAMES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe",
}


def byte_tokenizer(bos: bool = False) -> Tokenizer:
    """256 bytes without merges, then `<s>` = 256 and `</s>` = 257; `bos` puts the first of them before every text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ("<s>", "</s>")])
    if bos:
        tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    return tokenizer


def fast_tokenizer() -> PreTrainedTokenizerFast:
    """The byte tokenizer with its marks and a chat template."""
    fast = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(), bos_token="<s>", eos_token="</s>")
    fast.chat_template = CHAT_TEMPLATE
    return fast


def tiny_config(architecture: str = "LlamaForCausalLM", **fields: object) -> PretrainedConfig:
    """Two layers of a family, with the vocabulary of the byte tokenizer; `fields` replace what is set here."""
    shape: dict[str, object] = {
        "architectures": [architecture],
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
    }
    if architecture != "Qwen2ForCausalLM":
        shape["head_dim"] = 16
    if architecture == "Qwen3MoeForCausalLM":
        shape |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    return CONFIGS[architecture](**(shape | fields))


def save_folder(
    folder: Path, config: PretrainedConfig, *, seed: int = 0, max_shard_size: str = "1GB", tokenizer: bool = True
) -> PreTrainedModel:
    """Write a Hugging Face folder and return the model that it holds."""
    model: PreTrainedModel = make_reference(config, seed)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    (folder / "generation_config.json").unlink(missing_ok=True)
    if tokenizer:
        fast_tokenizer().save_pretrained(folder)
    return model


def gguf_metadata(config: PretrainedConfig) -> dict[str, object]:
    """What a GGUF file says of a config, by key without the architecture's prefix."""
    metadata: dict[str, object] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
    }
    if "head_dim" in config.to_dict():
        metadata["attention.key_length"] = metadata["attention.value_length"] = config.head_dim
    if config.model_type == "qwen3_moe":
        metadata |= {
            "expert_count": config.num_experts,
            "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.moe_intermediate_size,
        }
    return metadata


def gguf_tensors(model: PreTrainedModel) -> dict[str, np.ndarray]:
    """A model's float32 tensors as llama.cpp's converter names and orders them."""
    config = model.config
    names = gguf.get_tensor_name_map(
        {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}[GGUF_NAMES[config.architectures[0]]],
        config.num_hidden_layers,
    )
    tensors: dict[str, np.ndarray] = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if ".mlp.experts." in name:
            layer = name.split(".")[2]
            if name.endswith("down_proj"):
                tensors[f"blk.{layer}.ffn_down_exps.weight"] = tensor.numpy()
            else:
                gate, up = tensor.chunk(2, dim=1)
                tensors[f"blk.{layer}.ffn_gate_exps.weight"] = gate.numpy()
                tensors[f"blk.{layer}.ffn_up_exps.weight"] = up.numpy()
            continue
        stem, kind = name.rsplit(".", 1)
        if config.model_type == "llama" and stem.endswith(("q_proj", "k_proj")):
            tensor = _interleave_halves(tensor, config.head_dim)
        tensors[f"{names.get_name(stem)}.{kind}"] = tensor.numpy()
    return tensors


def _interleave_halves(tensor: Tensor, head_size: int) -> Tensor:
    """Put row i of the second half of each head behind row i of the first."""
    heads = tensor.unflatten(0, (-1, head_size))
    first, second = heads.chunk(2, dim=1)
    return torch.stack([first, second], dim=2).flatten(1, 2).flatten(0, 1)


def write_gguf(
    path: Path,
    architecture: str,
    metadata: Mapping[str, object],
    tensors: Mapping[str, np.ndarray],
    *,
    tokenizer: Mapping[str, object] | None = None,
    types: Mapping[str, gguf.GGMLQuantizationType] | None = None,
) -> Path:
    """Write a GGUF file; keys with a known first word are whole, others are the architecture's.

    `types` says which tensors are quantised; the others are written as their arrays' dtypes say.
    """
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {**metadata, **(tokenizer or {})}.items():
        whole = key if key.split(".")[0] in ("general", "tokenizer", "split") else f"{architecture}.{key}"
        if isinstance(value, bool):
            writer.add_bool(whole, value)
        elif isinstance(value, int):
            writer.add_uint32(whole, value)
        elif isinstance(value, float):
            writer.add_float32(whole, value)
        elif isinstance(value, str):
            writer.add_string(whole, value)
        else:
            assert isinstance(value, list)
            writer.add_array(whole, value)
    for name, array in tensors.items():
        kind = (types or {}).get(name)
        if kind is None:
            writer.add_tensor(name, np.ascontiguousarray(array))
        else:
            writer.add_tensor(name, gguf.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_gguf_tokenizer(**changes: object) -> dict[str, object]:
    """The byte tokenizer as GGUF metadata; `changes` are keys without `tokenizer.ggml.`."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<s>", "</s>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 256 + [3, 3],
        "tokenizer.ggml.bos_token_id": BOS,
        "tokenizer.ggml.eos_token_id": EOS,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    } | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}


def save_gguf(path: Path, config: PretrainedConfig, *, seed: int = 0, **metadata: object) -> PreTrainedModel:
    """Write a GGUF file of float32 tensors and return the model that it holds."""
    model: PreTrainedModel = make_reference(config, seed)
    write_gguf(
        path,
        GGUF_NAMES[config.architectures[0]],
        gguf_metadata(config) | metadata,
        gguf_tensors(model),
        tokenizer=byte_gguf_tokenizer(),
    )
    return model
