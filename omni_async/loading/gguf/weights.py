"""The tensors of a GGUF file under the names that `transformers` gives them, dequantised on their way."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from gguf import GGMLQuantizationType, dequantize
from numpy.typing import NDArray
from torch import Tensor
from transformers import PretrainedConfig

from omni_async.errors import UnsupportedModel
from omni_async.loading.checkpoint import row_pieces
from omni_async.loading.gguf.config import FAMILIES, ROPE_FACTORS
from omni_async.loading.gguf.file import GGUFFile, GGUFTensor

Type = GGMLQuantizationType

DEQUANTISED = frozenset(
    {Type.F32, Type.F16, Type.BF16}
    | {Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0}
    | {Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K, Type.Q6_K, Type.IQ4_NL, Type.IQ4_XS}
)
"""The types that `gguf.dequantize` knows and that models of text are published in."""

PIECE_ELEMENTS = 2**15
"""Elements dequantised at a time: they stay in the processor's cache, and torch copies no more than these on one
thread, which matters where other work keeps the cores busy."""

LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
EXPERT_MODULES = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


@dataclass(frozen=True, slots=True)
class GGUFWeight:
    """A `Weight` in a memory-mapped file."""

    name: str
    file: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    data: NDArray[np.uint8]
    """`[rows, bytes of a row] uint8`; the elements of a vector are its rows."""
    row_order: NDArray[np.intp] | None = None
    """Where each row lies in the file; `None`: in order."""

    @property
    def num_bytes(self) -> int:
        """Its size in the file."""
        return self.data.nbytes

    def copy_to(self, destination: Tensor, start: int = 0) -> None:
        """Write rows `start` and following into `destination`, as many as it has."""
        for first, piece in row_pieces(destination, PIECE_ELEMENTS):
            rows = slice(start + first, start + first + len(piece))
            stored = self.data[rows] if self.row_order is None else self.data[self.row_order[rows]]
            # As one row: `dequantize` loops over rows in Python.
            values = np.require(dequantize(stored.reshape(1, -1), self.type), requirements="W")
            piece.copy_(torch.from_numpy(values).view(piece.shape))


def make_weights(file: GGUFFile, config: PretrainedConfig) -> Iterator[GGUFWeight]:
    """Every tensor of the file; names that are unknown here are passed on for the model to refuse.

    Raises:
        UnsupportedModel: a tensor is of a type that cannot be dequantised.
    """
    permuted = FAMILIES[file.require("general.architecture", str)].permuted
    for tensor in file.tensors.values():
        _check_type(file, tensor)
        if tensor.name == ROPE_FACTORS:  # part of the config
            continue
        layer = LAYER_NAME.fullmatch(tensor.name)
        if layer is None:
            yield _make_weight(file, NAMES.get(tensor.name, tensor.name), tensor)
            continue
        number, module, kind = layer.groups()
        prefix = f"model.layers.{number}."
        if module in EXPERT_MODULES and len(tensor.shape) == 3:
            for expert, data in enumerate(tensor.data):
                name = f"{prefix}mlp.experts.{expert}.{EXPERT_MODULES[module]}.{kind}"
                yield GGUFWeight(name, str(file.path), tensor.shape[1:], tensor.type, data)
        elif module in MODULES:
            heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(module)
            order = _unpermuted_rows(tensor.shape[0], heads) if permuted and heads is not None else None
            yield _make_weight(file, f"{prefix}{MODULES[module]}.{kind}", tensor, order)
        else:
            yield _make_weight(file, tensor.name, tensor)


def _make_weight(
    file: GGUFFile, name: str, tensor: GGUFTensor, row_order: NDArray[np.intp] | None = None
) -> GGUFWeight:
    data = tensor.data if len(tensor.shape) > 1 else tensor.data.reshape(tensor.shape[0], -1)
    return GGUFWeight(name, str(file.path), tensor.shape, tensor.type, data, row_order)


def _check_type(file: GGUFFile, tensor: GGUFTensor) -> None:
    if tensor.type not in DEQUANTISED:
        known = ", ".join(sorted(known.name for known in DEQUANTISED))
        raise UnsupportedModel(f"{file.path}: tensor {tensor.name} is of type {tensor.type.name}, not one of {known}")
    if len(tensor.shape) == 1 and tensor.data.nbytes % tensor.shape[0]:
        raise UnsupportedModel(f"{file.path}: tensor {tensor.name} is a vector in the block type {tensor.type.name}")


def _unpermuted_rows(num_rows: int, num_heads: int) -> NDArray[np.intp]:
    """Where the rows of a query or key matrix lie in a file of the families that llama.cpp permutes.

    The file interleaves the two halves of each head, so that a rotation turns neighbours
    (https://github.com/ggml-org/llama.cpp/blob/master/convert_hf_to_gguf.py, `LlamaModel.permute`).
    """
    return np.arange(num_rows).reshape(num_heads, -1, 2).swapaxes(1, 2).reshape(-1)
