import dataclasses
import json
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch

from omni_async.errors import CheckpointError, LoadError, OptionError, UnsupportedModel
from omni_async.loading.loaded import Loaded
from omni_async.loading.pretrained import load_pretrained
from tests.support.checkpoints import EOS, save_folder, save_gguf, tiny_config

NEUTRAL: dict[str, Any] = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "eos_token_ids": (EOS,),
}


def load(path: Path | str, dtype: str | None = None, device: str = "cpu") -> Loaded:
    return load_pretrained(path, dtype=dtype, device=device, progress=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_folder(tmp_path / "tiny", tiny_config())
    return tmp_path / "tiny"


def edit_config(folder: Path, **fields: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))


def test_what_is_loaded(folder: Path) -> None:
    loaded = load(str(folder))
    assert loaded.name == "tiny"
    assert loaded.device == torch.device("cpu")
    assert loaded.model.spec.vocab_size == 258
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.eos_token_id == EOS


def test_auto_takes_a_device_that_is_there(folder: Path) -> None:
    assert load(folder, device="auto").device.type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("options", [{"dtype": "int8"}, {"dtype": "Float32"}, {"device": "tpu"}, {"device": "meta"}])
def test_illegal_options(folder: Path, options: dict[str, str]) -> None:
    [value] = options.values()
    with pytest.raises(OptionError, match=value):
        load(folder, **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_device_that_is_not_there(folder: Path) -> None:
    with pytest.raises(OptionError, match="no CUDA device"):
        load(folder, device="cuda")


def test_a_dtype_in_the_config_that_is_not_built_in(folder: Path) -> None:
    edit_config(folder, dtype="float64")
    with pytest.raises(OptionError, match="float64"):
        load(folder)
    assert load(folder, "float32").dtype == torch.float32


class TestConfig:
    def test_unknown_architecture(self, folder: Path) -> None:
        edit_config(folder, architectures=["MambaForCausalLM"])
        with pytest.raises(UnsupportedModel, match=r"MambaForCausalLM.*LlamaForCausalLM"):
            load(folder)

    @pytest.mark.parametrize("value", [None, [], "LlamaForCausalLM", [3]])
    def test_no_architecture(self, folder: Path, value: object) -> None:
        edit_config(folder, architectures=value)
        with pytest.raises(CheckpointError, match=r"config\.json.*architectures"):
            load(folder)

    def test_quantised_weights(self, folder: Path) -> None:
        edit_config(folder, quantization_config={"quant_method": "gptq", "bits": 4})
        with pytest.raises(UnsupportedModel, match="gptq"):
            load(folder)

    @pytest.mark.parametrize("text", ["", "{", "[]", "null"])
    def test_corrupt_json(self, folder: Path, text: str) -> None:
        (folder / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"config\.json"):
            load(folder)

    @pytest.mark.parametrize(
        "fields",
        [{"hidden_size": "large"}, {"num_attention_heads": 0}, {"model_type": "no_such_model"}, {"vocab_size": None}],
    )
    def test_senseless_values(self, folder: Path, fields: dict[str, object]) -> None:
        edit_config(folder, **fields)
        with pytest.raises(CheckpointError, match=r"config\.json"):
            load(folder)


class TestDefaults:
    @staticmethod
    def defaults(folder: Path, generation: dict[str, object] | None) -> dict[str, Any]:
        if generation is not None:
            (folder / "generation_config.json").write_text(json.dumps(generation))
        return dataclasses.asdict(load(folder).defaults)

    @pytest.mark.parametrize("generation", [None, {}, {"do_sample": True}, {"temperature": None, "top_p": None}])
    def test_neutral(self, folder: Path, generation: dict[str, object] | None) -> None:
        assert self.defaults(folder, generation) == NEUTRAL

    @pytest.mark.parametrize("said", [{}, {"do_sample": True}])
    def test_what_is_recommended_is_taken(self, folder: Path, said: dict[str, object]) -> None:
        values = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.05, "repetition_penalty": 1.1}
        assert self.defaults(folder, said | values) == NEUTRAL | values

    @pytest.mark.parametrize("said", [{"do_sample": False, "temperature": 0.7}, {}])
    def test_values_for_sampling_are_not_meant_for_greedy_decoding(self, folder: Path, said: dict[str, object]) -> None:
        found = self.defaults(folder, said | {"top_k": 20, "top_p": 0.8, "repetition_penalty": 1.1})
        assert found == NEUTRAL | {"repetition_penalty": 1.1}

    @pytest.mark.parametrize(("eos", "expected"), [(7, (7,)), ([9, 7, 9], (9, 7)), (None, (EOS,))])
    def test_end_marks(self, folder: Path, eos: object, expected: tuple[int, ...]) -> None:
        assert self.defaults(folder, {"eos_token_id": eos})["eos_token_ids"] == expected

    def test_end_marks_from_the_config_then_from_the_tokenizer(self, folder: Path) -> None:
        edit_config(folder, eos_token_id=[3, 4])
        assert load(folder).defaults.eos_token_ids == (3, 4)
        edit_config(folder, eos_token_id=None)
        assert load(folder).defaults.eos_token_ids == (EOS,)

    @pytest.mark.parametrize(
        "generation",
        [
            {"temperature": -1},
            {"temperature": "hot"},
            {"do_sample": True, "top_p": 2},
            {"eos_token_id": "</s>"},
            {"eos_token_id": [-1]},
            {"eos_token_id": [True]},
        ],
    )
    def test_illegal_values(self, folder: Path, generation: dict[str, object]) -> None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
        with pytest.raises(CheckpointError, match=r"generation_config\.json"):
            load(folder)


class TestPaths:
    def test_a_folder_with_one_gguf_file(self, tmp_path: Path) -> None:
        save_gguf(tmp_path / "model.gguf", tiny_config())
        assert load(tmp_path).model.spec.hidden_size == 64

    def test_a_folder_with_two_gguf_files(self, tmp_path: Path) -> None:
        for name in ("a.gguf", "b.gguf"):
            (tmp_path / name).touch()
        with pytest.raises(CheckpointError, match=r"2 \.gguf files"):
            load(tmp_path)
        with pytest.raises(CheckpointError, match=r"a\.gguf"):
            load(tmp_path / "a.gguf")

    def test_an_empty_folder(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match=r"no config\.json"):
            load(tmp_path)

    def test_another_kind_of_file(self, folder: Path) -> None:
        with pytest.raises(CheckpointError, match="neither a folder"):
            load(folder / "model.safetensors")

    @pytest.mark.parametrize("path", [Path("no/such"), "./no/such", "/no/such", "~/no/such", "no-such.gguf"])
    def test_a_path_that_is_not_there(self, path: Path | str) -> None:
        with pytest.raises(LoadError, match="no such file or folder"):
            load(path)

    @pytest.mark.parametrize("name", ["nobody/no-such-model", "no such model", "a/b/c"])
    def test_a_name_that_is_not_on_the_hub(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(LoadError, match=name):
            load(name)
