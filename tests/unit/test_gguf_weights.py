"""The weights of GGUF files under the names, in the order and with the values that `transformers` gives them."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file
from torch import Tensor

from omni_async.errors import CheckpointError
from omni_async.loading.gguf import weights
from omni_async.loading.gguf.weights import DEQUANTISED, GGUFWeight
from omni_async.loading.pretrained import load_pretrained
from omni_async.models.layers.causal_lm import CausalLM
from tests.support.checkpoints import (
    CONFIGS,
    GGUF_NAMES,
    byte_gguf_tokenizer,
    gguf_metadata,
    gguf_tensors,
    save_folder,
    save_gguf,
    tiny_config,
    write_gguf,
)
from tests.support.tiny import make_reference


def parameters(path: Path, dtype: str | None = None) -> dict[str, Tensor]:
    model = load_pretrained(path, dtype=dtype, device="cpu", progress=False).model
    assert isinstance(model, CausalLM)
    return dict(model.destinations())


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("architecture", CONFIGS)
def test_equal_to_the_folder_of_the_same_model(architecture: str, tied: bool, tmp_path: Path) -> None:
    config = tiny_config(architecture, tie_word_embeddings=tied)
    save_folder(tmp_path / "folder", config)
    save_gguf(tmp_path / "model.gguf", config)
    expected = load_file(tmp_path / "folder" / "model.safetensors")
    found = parameters(tmp_path / "model.gguf")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_biases_of_permuted_rows(tmp_path: Path) -> None:
    config = tiny_config(attention_bias=True, mlp_bias=True)
    save_folder(tmp_path / "folder", config)
    save_gguf(tmp_path / "model.gguf", config)
    found = parameters(tmp_path / "model.gguf")
    for name, tensor in load_file(tmp_path / "folder" / "model.safetensors").items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_quantised_weights_are_dequantised_then_rounded(dtype: str, tmp_path: Path) -> None:
    config = tiny_config()
    tensors = gguf_tensors(make_reference(config))
    kind = Type.Q4_1
    matrices = {name: kind for name, array in tensors.items() if array.ndim == 2}
    path = write_gguf(
        tmp_path / "q.gguf", "llama", gguf_metadata(config), tensors, tokenizer=byte_gguf_tokenizer(), types=matrices
    )
    exact = {name: gguf.dequantize(gguf.quantize(tensors[name], kind), kind) for name in matrices}
    same = write_gguf(
        tmp_path / "f.gguf", "llama", gguf_metadata(config), tensors | exact, tokenizer=byte_gguf_tokenizer()
    )
    found, expected = parameters(path, dtype), parameters(same)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor.to(found[name].dtype)), name


@pytest.mark.parametrize("kind", sorted(DEQUANTISED), ids=lambda kind: kind.name)
@pytest.mark.parametrize("ordered", [True, False])
def test_pieces_of_rows_equal_the_whole(kind: Type, ordered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "PIECE_ELEMENTS", 3 * 512)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(0)
    data = rng.integers(0, 256, (17, 512 // block * size), dtype=np.uint8)
    if kind in (Type.F32, Type.F16, Type.BF16):
        data = gguf.quantize(rng.standard_normal((17, 512), dtype=np.float32), kind).view(np.uint8)
    with np.errstate(all="ignore"):
        whole = torch.tensor(gguf.dequantize(data, kind))
        order = None if ordered else rng.permutation(17)
        weight = GGUFWeight("w", "f", (17, 512), kind, data, order)
        expected = whole if order is None else whole[order]
        for start, rows in ((0, 17), (5, 7), (16, 1)):
            destination = torch.full((rows, 512), torch.nan)
            weight.copy_to(destination, start)
            assert destination.equal(expected[start : start + rows]) or torch.allclose(
                destination, expected[start : start + rows], rtol=0, atol=0, equal_nan=True
            )


def test_an_unknown_tensor_is_refused_under_its_own_name(tmp_path: Path) -> None:
    config = tiny_config()
    tensors = gguf_tensors(make_reference(config)) | {"blk.0.attn_sinks.weight": np.ones(4, np.float32)}
    path = write_gguf(tmp_path / "m.gguf", "llama", gguf_metadata(config), tensors)
    with pytest.raises(CheckpointError, match=r"m\.gguf: unexpected tensor blk\.0\.attn_sinks\.weight"):
        parameters(path)


@pytest.mark.parametrize("architecture", CONFIGS)
def test_a_missing_tensor(architecture: str, tmp_path: Path) -> None:
    config = tiny_config(architecture)
    tensors = gguf_tensors(make_reference(config))
    del tensors["blk.1.attn_v.weight"]
    path = write_gguf(tmp_path / "m.gguf", GGUF_NAMES[architecture], gguf_metadata(config), tensors)
    with pytest.raises(CheckpointError, match=r"m\.gguf: missing tensor model\.layers\.1\.self_attn\.v_proj\.weight"):
        parameters(path)


def test_a_misshapen_tensor(tmp_path: Path) -> None:
    config = tiny_config()
    tensors = gguf_tensors(make_reference(config)) | {"output_norm.weight": np.ones(63, np.float32)}
    path = write_gguf(tmp_path / "m.gguf", "llama", gguf_metadata(config), tensors)
    with pytest.raises(CheckpointError, match=r"m\.gguf: tensor model\.norm\.weight has shape \[63\]"):
        parameters(path)
