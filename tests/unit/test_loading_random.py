"""Random weights for a config alone."""

import json
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from torch import Tensor

from omni_async import CheckpointError, Engine, EngineOptions, OptionError, Request, RequestError, SamplingParams
from omni_async.errors import LoadError, UnsupportedModel
from omni_async.loading.pretrained import load_pretrained
from omni_async.loading.random import RandomWeights
from omni_async.models.layers.causal_lm import CausalLM
from omni_async.models.registry import ARCHITECTURES
from tests.support.checkpoints import fast_tokenizer, save_folder, save_gguf, tiny_config
from tests.support.scripted import ScriptedModel

CPU = torch.device("cpu")


def config_only(folder: Path, architecture: str = "LlamaForCausalLM", **fields: object) -> Path:
    tiny_config(architecture, **fields).save_pretrained(folder)
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    return folder


def weights_of(folder: Path, dtype: str | None = None) -> dict[str, Tensor]:
    model = load_pretrained(folder, dtype=dtype, device="cpu", load_format="random", progress=False).model
    assert isinstance(model, CausalLM)
    return dict(model.destinations())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_weights_are_what_such_a_model_begins_with(architecture: str, tmp_path: Path) -> None:
    weights = weights_of(config_only(tmp_path, architecture))
    for name, weight in weights.items():
        if "norm" in name:
            assert torch.equal(weight, torch.ones_like(weight))
        elif weight.dim() == 1:
            assert name.endswith(".bias")
            assert 0 < weight.abs().max() < 0.1
        else:
            assert weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert any(name.endswith(".bias") for name in weights) == (architecture == "Qwen2ForCausalLM")
    again = weights_of(tmp_path)
    assert all(torch.equal(weight, again[name]) for name, weight in weights.items())
    assert not torch.equal(weights["model.embed_tokens.weight"], weights["lm_head.weight"])


def test_another_seed_gives_other_weights(tmp_path: Path) -> None:
    model = load_pretrained(config_only(tmp_path), device="cpu", load_format="random", progress=False).model
    assert isinstance(model, CausalLM)
    before = model.embedding.clone()
    model.load(RandomWeights(model, CPU, seed=1))
    assert not torch.equal(model.embedding, before)
    model.load(RandomWeights(model, CPU))
    assert torch.equal(model.embedding, before)


@pytest.mark.parametrize(
    ("stored", "asked", "expected"),
    [
        ("bfloat16", None, torch.bfloat16),
        ("bfloat16", "float16", torch.float16),
        (None, None, torch.float32),
    ],
)
def test_the_dtype_is_the_option_s_or_the_config_s(
    stored: str | None, asked: str | None, expected: torch.dtype, tmp_path: Path
) -> None:
    config_only(tmp_path)
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text())
    fields.pop("dtype", None)
    path.write_text(json.dumps(fields if stored is None else fields | {"dtype": stored}))
    assert {weight.dtype for weight in weights_of(tmp_path, asked).values()} == {expected}


def test_a_tied_head_is_the_embedding(tmp_path: Path) -> None:
    assert "lm_head.weight" not in weights_of(config_only(tmp_path, tie_word_embeddings=True))


async def answer(folder: Path, request: Request) -> tuple[tuple[int, ...], str]:
    async with Engine.from_pretrained(
        folder, load_format="random", device="cpu", num_blocks=32, progress=False
    ) as engine:
        result = await engine.generate(request)
        return result.token_ids, result.text


GREEDY = SamplingParams(temperature=0.0, repetition_penalty=1.3, max_tokens=12, ignore_eos=True)


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_an_engine_serves_token_ids_and_gives_the_same_ones_again(tmp_path: Path) -> None:
    config_only(tmp_path, "Qwen3MoeForCausalLM")
    request = Request(prompt_token_ids=[1, 2, 3], sampling=GREEDY)
    ids, text = await answer(tmp_path, request)
    assert len(set(ids)) >= 6
    assert text == ""
    assert await answer(tmp_path, request) == (ids, "")
    with pytest.raises(RequestError, match="no tokenizer files"):
        await answer(tmp_path, Request(prompt="abc"))


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_tokenizer_files_are_used_and_stored_weights_are_not(tmp_path: Path) -> None:
    bare, full = tmp_path / "bare", tmp_path / "full"
    request = Request(prompt_token_ids=[1, 2, 3], sampling=GREEDY)
    ids, _ = await answer(config_only(bare), request)
    save_folder(full, tiny_config())
    (full / "model.safetensors").write_bytes(b"damaged")
    same_ids, text = await answer(full, request)
    assert same_ids == ids
    assert text == fast_tokenizer().decode(ids, skip_special_tokens=True)


def test_the_weights_are_needed_without_the_option(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors"):
        load_pretrained(config_only(tmp_path), device="cpu", progress=False)


def test_what_cannot_have_random_weights_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_gguf(tmp_path / "model.gguf", tiny_config())
    for path in (tmp_path, tmp_path / "model.gguf"):
        with pytest.raises(CheckpointError, match=r"a folder that holds a config\.json"):
            load_pretrained(path, device="cpu", load_format="random", progress=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(LoadError, match="nobody/nothing"):
        load_pretrained("nobody/nothing", device="cpu", load_format="random", progress=False)
    (tmp_path / "config.json").write_text('{"architectures": ["MambaForCausalLM"]}')
    with pytest.raises(UnsupportedModel, match="MambaForCausalLM"):
        load_pretrained(tmp_path, device="cpu", load_format="random", progress=False)
    with pytest.raises(UnsupportedModel, match="ScriptedModel"):
        RandomWeights(ScriptedModel([]), CPU)


@pytest.mark.parametrize("value", ["dummy", None, True])
def test_an_unknown_format_is_refused(value: object) -> None:
    with pytest.raises(OptionError, match="load_format must be 'auto' or 'random'"):
        EngineOptions(load_format=value)  # type: ignore[arg-type]
