"""Tiny models of `transformers` with weights that make outputs vary, and their checkpoints as `Weight`s."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig

SIZES: Mapping[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


@torch.no_grad()
def make_reference(config: PretrainedConfig, seed: int = 0) -> Any:
    """A model whose matrices have the scale 1 / sqrt(inputs) and whose norms and biases are not trivial.

    With the usual initialisation a tiny model's output hardly depends on its input. A tied embedding is a matrix like
    any other here: with larger rows, every token's best successor would be itself.
    """
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "embed_tokens" in name and not config.tie_word_embeddings:
            parameter.copy_(noise)
        elif parameter.ndim >= 2:
            parameter.copy_(noise / parameter.shape[-1] ** 0.5)
        elif "norm" in name:
            parameter.copy_(1 + 0.1 * noise)
        else:
            parameter.copy_(0.1 * noise)
    return model


@dataclass(frozen=True)
class TensorWeight:
    """A `Weight` that is in memory."""

    name: str
    tensor: Tensor
    file: str = "model.safetensors"

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def copy_to(self, destination: Tensor, start: int = 0) -> None:
        destination.copy_(self.tensor[start : start + len(destination)])


def saved_weights(reference: Any, folder: Path) -> list[TensorWeight]:
    """The tensors that `save_pretrained` writes, under the names that it writes."""
    reference.save_pretrained(folder)
    return as_weights(load_file(folder / "model.safetensors"))


def as_weights(tensors: Mapping[str, Tensor]) -> list[TensorWeight]:
    return [TensorWeight(name, tensor) for name, tensor in tensors.items()]


def token_ids(length: int, vocab_size: int, seed: int = 0) -> list[int]:
    """Random ids."""
    ids: list[int] = torch.randint(vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return ids


@torch.inference_mode()
def reference_logits(reference: Any, ids: Iterable[int]) -> Tensor:
    """Logits `[n, V]` of `transformers` at every position of one sequence."""
    logits: Tensor = reference(input_ids=torch.tensor([list(ids)])).logits[0]
    return logits
