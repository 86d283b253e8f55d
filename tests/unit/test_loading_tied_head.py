"""A checkpoint whose config ties the head to the embedding, but whose file may hold both."""

import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from omni_async.backend.reference.ops import ReferenceOps
from omni_async.loading.pretrained import load_pretrained
from omni_async.models.layers.causal_lm import CausalLM
from tests.support.checkpoints import save_folder, tiny_config
from tests.support.forward import Forward

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
PROMPT = [1, 5, 200, 7, 7, 256]


def load(folder: Path) -> CausalLM:
    model = load_pretrained(folder, device="cpu", progress=False).model
    assert isinstance(model, CausalLM)
    return model


def logits(model: CausalLM) -> Tensor:
    [rows] = Forward(model, ReferenceOps(), [PROMPT]).step([(0, len(PROMPT))])
    return rows


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Holds the embedding alone."""
    save_folder(tmp_path, tiny_config(tie_word_embeddings=True))
    assert HEAD not in load_file(tmp_path / "model.safetensors")
    return tmp_path


def store_head(folder: Path, head: Tensor) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, HEAD: head.clone()}, folder / "model.safetensors")


def test_absent_and_identical_heads_give_equal_logits(folder: Path) -> None:
    alone = load(folder)
    store_head(folder, load_file(folder / "model.safetensors")[EMBEDDING])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        both = load(folder)
    for model in (alone, both):
        assert model.head.data_ptr() == model.embedding.data_ptr()
    assert torch.equal(logits(alone), logits(both))


def test_a_different_head_is_not_used_and_warned_of(folder: Path) -> None:
    alone = load(folder)
    stored = load_file(folder / "model.safetensors")[EMBEDDING]
    head = stored.clone()
    head[-1, -1] += 1
    store_head(folder, head)
    with pytest.warns(UserWarning, match=r"lm_head\.weight differs"):
        both = load(folder)
    assert both.head.data_ptr() == both.embedding.data_ptr()
    assert torch.equal(both.embedding, stored)
    assert torch.equal(logits(alone), logits(both))


def test_an_untied_head_is_used(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    untied = tmp_path_factory.mktemp("untied")
    save_folder(untied, tiny_config(tie_word_embeddings=False))
    model = load(untied)
    assert model.head.data_ptr() != model.embedding.data_ptr()
    assert torch.equal(model.head, load_file(untied / "model.safetensors")[HEAD])
