import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from omni_async.errors import CheckpointError, LoadError, UnsupportedModel
from omni_async.loading.loaded import Loaded
from omni_async.loading.pretrained import load_pretrained
from omni_async.models.layers.causal_lm import CausalLM
from tests.support.checkpoints import CONFIGS, save_folder, tiny_config

NORM = "model.norm.weight"
INDEX = "model.safetensors.index.json"


def load(path: Path, dtype: str | None = None) -> Loaded:
    return load_pretrained(path, dtype=dtype, device="cpu", progress=False)


def parameters(loaded: Loaded) -> dict[str, Tensor]:
    assert isinstance(loaded.model, CausalLM)
    return dict(loaded.model.destinations())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_folder(tmp_path, tiny_config())
    return tmp_path


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Four shards; the second is not the last to be read."""
    save_folder(tmp_path, tiny_config(), max_shard_size="100KB")
    return tmp_path


def rewrite(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def second(shards: Path) -> Path:
    return sorted(shards.glob("*.safetensors"))[1]


def place(shards: Path, tensor: str, shard: object) -> None:
    index = json.loads((shards / INDEX).read_text())
    index["weight_map"][tensor] = shard
    (shards / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize("architecture", CONFIGS)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_one_file_and_shards_load_what_was_saved(architecture: str, tied: bool, tmp_path: Path) -> None:
    config = tiny_config(architecture, tie_word_embeddings=tied)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    save_folder(whole, config)
    save_folder(cut, config, max_shard_size="100KB")
    assert len(list(cut.glob("*.safetensors"))) > 1
    saved = load_file(whole / "model.safetensors")
    for path in (whole, cut):
        found = parameters(load(path))
        assert found.keys() == saved.keys()
        for name, tensor in saved.items():
            assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("fp32", torch.float32), ("half", torch.float16), ("bfloat16", torch.bfloat16), (None, torch.float32)],
)
def test_weights_are_converted_to_the_run_dtype(folder: Path, dtype: str | None, expected: torch.dtype) -> None:
    saved = load_file(folder / "model.safetensors")
    loaded = load(folder, dtype)
    assert loaded.dtype == expected
    for name, tensor in parameters(loaded).items():
        assert torch.equal(tensor, saved[name].to(expected)), name


def test_the_dtype_of_a_config_without_one_is_that_of_the_weights(folder: Path) -> None:
    rewrite(folder / "model.safetensors", lambda tensors: tensors.update({k: v.half() for k, v in tensors.items()}))
    config = json.loads((folder / "config.json").read_text())
    del config["dtype"]
    (folder / "config.json").write_text(json.dumps(config))
    assert load(folder).dtype == torch.float16


def test_a_shard_may_be_a_link(shards: Path) -> None:
    shard, blob = second(shards), shards / "blob"
    shard.rename(blob)
    shard.symlink_to(blob)
    load(shards)


def test_old_rotary_tables_are_ignored(folder: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(folder / "model.safetensors", lambda tensors: tensors.update({name: torch.ones(8)}))
    load(folder)


class TestDamage:
    """Every kind of damage is an error that names the file, and the tensor where one is at fault."""

    @staticmethod
    def refused(path: Path, *words: str, kind: type[LoadError] = CheckpointError) -> None:
        with pytest.raises(kind) as caught:
            load(path)
        for word in words:
            assert word in str(caught.value)

    def test_missing_shard(self, shards: Path) -> None:
        shard = second(shards)
        shard.unlink()
        weight_map = json.loads((shards / INDEX).read_text())["weight_map"]
        lost = next(tensor for tensor, place in weight_map.items() if place == shard.name)
        self.refused(shards, str(shard), "missing", lost)

    def test_dangling_link(self, shards: Path) -> None:
        shard = second(shards)
        shard.unlink()
        shard.symlink_to(shards / "blob")
        self.refused(shards, str(shard), "missing")

    @pytest.mark.parametrize("keep", [0, 4, 8, 100, 0.5, 0.999])
    def test_shard_cut_short(self, shards: Path, keep: float) -> None:
        shard = second(shards)
        data = shard.read_bytes()
        shard.write_bytes(data[: int(keep if keep > 1 else keep * len(data))])
        self.refused(shards, str(shard), "not a complete safetensors file")

    def test_header_of_garbage(self, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", 16) + b"{not json at all" + bytes(64))
        self.refused(folder, "model.safetensors", "not a complete safetensors file")

    def test_header_longer_than_any_file(self, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"\xff" * 64)
        self.refused(folder, "model.safetensors", "not a complete safetensors file")

    def test_tensor_listed_but_absent(self, shards: Path) -> None:
        shard = second(shards)
        [lost, *_] = load_file(shard)
        rewrite(shard, lambda tensors: tensors.pop(lost))
        self.refused(shards, str(shard), lost)

    def test_tensor_present_but_unlisted(self, shards: Path) -> None:
        rewrite(second(shards), lambda tensors: tensors.update(stray=torch.ones(1)))
        self.refused(shards, str(second(shards)), "stray", "not listed")

    def test_tensor_in_two_shards(self, shards: Path) -> None:
        first = sorted(shards.glob("*.safetensors"))[0]
        [shared, *_] = load_file(first)
        rewrite(second(shards), lambda tensors: tensors.update({shared: load_file(first)[shared]}))
        self.refused(shards, second(shards).name, first.name, shared)

    @pytest.mark.parametrize("shard", ["../outside", "/etc/passwd", "sub/x", "..", ".", "", "a\\b", 7, None, ["x"]])
    def test_index_reaching_outside(self, shards: Path, shard: object) -> None:
        place(shards, NORM, shard)
        self.refused(shards, INDEX, NORM, repr(shard))

    @pytest.mark.parametrize("text", ["", "{", "[1]", "{}", '{"weight_map": []}', '{"weight_map": {}}', "\x00", '"x"'])
    def test_corrupt_index(self, shards: Path, text: str) -> None:
        (shards / INDEX).write_text(text)
        self.refused(shards, INDEX)

    @pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "last.ckpt"])
    def test_pickle_files_only(self, folder: Path, name: str) -> None:
        (folder / "model.safetensors").rename(folder / name)
        self.refused(folder, name, "pickle", kind=UnsupportedModel)

    def test_no_weights_at_all(self, folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        self.refused(folder, str(folder), "model.safetensors")

    def test_missing_tensor(self, folder: Path) -> None:
        rewrite(folder / "model.safetensors", lambda tensors: tensors.pop(NORM))
        self.refused(folder, "model.safetensors", "missing", NORM)

    def test_unexpected_tensor(self, folder: Path) -> None:
        rewrite(folder / "model.safetensors", lambda tensors: tensors.update({"model.extra": torch.ones(1)}))
        self.refused(folder, "model.safetensors", "unexpected", "model.extra")

    def test_wrong_shape(self, folder: Path) -> None:
        rewrite(folder / "model.safetensors", lambda tensors: tensors.update({NORM: torch.ones(63)}))
        self.refused(folder, "model.safetensors", NORM, "[63]", "[64]")

    @pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.float64, torch.float8_e4m3fn])
    def test_wrong_dtype(self, folder: Path, dtype: torch.dtype) -> None:
        rewrite(folder / "model.safetensors", lambda tensors: tensors.update({NORM: torch.ones(64).to(dtype)}))
        self.refused(folder, "model.safetensors", NORM, kind=UnsupportedModel)

    def test_nothing_is_allocated_for_a_damaged_checkpoint(self, shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def allocate(*_: object, **__: object) -> None:
            raise AssertionError("the model was made before the files were validated")

        monkeypatch.setattr("omni_async.loading.pretrained.ARCHITECTURES", {"LlamaForCausalLM": allocate})
        data = second(shards).read_bytes()
        second(shards).write_bytes(data[: len(data) // 2])
        self.refused(shards, str(second(shards)))
