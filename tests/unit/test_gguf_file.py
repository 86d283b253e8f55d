"""The layout of GGUF files, whole and damaged."""

import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from omni_async.errors import CheckpointError, LoadError, UnsupportedModel
from omni_async.loading.gguf.checkpoint import open_gguf
from omni_async.loading.gguf.file import read_gguf
from tests.support.checkpoints import save_gguf, tiny_config, write_gguf


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    save_gguf(path, tiny_config(num_hidden_layers=1))
    return path.read_bytes()


def test_agrees_with_the_reader_of_the_library(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(whole)
    ours, theirs = read_gguf(path), gguf.GGUFReader(path)
    assert ours.metadata == {
        key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")
    }
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        found = ours.tensors[tensor.name]
        assert found.shape == tuple(tensor.shape.tolist()[::-1])
        assert found.type == tensor.tensor_type
        assert found.data.tobytes() == tensor.data.tobytes()


def test_every_kind_of_metadata(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    values: list[tuple[Callable[[str, object], None], object]] = [
        (writer.add_uint8, 200),
        (writer.add_int8, -100),
        (writer.add_uint16, 60000),
        (writer.add_int16, -30000),
        (writer.add_uint32, 2**32 - 1),
        (writer.add_int32, -(2**31)),
        (writer.add_uint64, 2**64 - 1),
        (writer.add_int64, -(2**63)),
        (writer.add_float32, 0.5),
        (writer.add_float64, 0.1),
        (writer.add_bool, True),
        (writer.add_string, "ä€😀"),
        (writer.add_array, [1, -2, 3]),
        (writer.add_array, [0.5, 2.0]),
        (writer.add_array, ["", "ä", "b c"]),
        (writer.add_array, [True, False]),
    ]
    for i, (add, value) in enumerate(values):
        add(f"x.{i}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    metadata = read_gguf(path).metadata
    for i, (_, value) in enumerate(values):
        assert metadata[f"x.{i}"] == value
        assert type(metadata[f"x.{i}"]) is type(value)


@pytest.mark.parametrize("keep", [0, 3, 4, 8, 23, 24, 100, 2000, 0.05, 0.5, 0.9999])
def test_a_file_cut_short(whole: bytes, tmp_path: Path, keep: float) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(whole[: int(keep if keep > 1 else keep * len(whole))])
    with pytest.raises(CheckpointError, match=r"model\.gguf"):
        open_gguf(path)


def test_a_cut_tensor_is_named(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(whole)
    last = list(read_gguf(path).tensors)[-1]
    path.write_bytes(whole[:-64])
    with pytest.raises(CheckpointError, match=last):
        open_gguf(path)


@given(st.lists(st.tuples(st.integers(0, 6000), st.binary(min_size=4, max_size=4)), min_size=1, max_size=4))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damage_anywhere_before_the_weights_is_a_load_error_or_harmless(
    whole: bytes, tmp_path: Path, damage: list[tuple[int, bytes]]
) -> None:
    """No other exception, no hang, no memory beyond the file's size."""
    damaged = bytearray(whole)
    for position, values in damage:
        damaged[position : position + 4] = values
    path = tmp_path / "model.gguf"
    path.write_bytes(damaged)
    try:
        open_gguf(path)
    except LoadError as error:
        assert "model.gguf" in str(error)  # noqa: PT017


@pytest.mark.parametrize(
    ("head", "kind", "words"),
    [
        (b"PK\3\4", CheckpointError, "not a GGUF file"),
        (b"GGUF" + struct.pack("<I", 1), UnsupportedModel, "version 1"),
        (b"GGUF" + struct.pack(">I", 3), UnsupportedModel, "little-endian"),
        (b"GGUF" + struct.pack("<I", 99), UnsupportedModel, "version 99"),
    ],
)
def test_other_kinds_of_file(whole: bytes, tmp_path: Path, head: bytes, kind: type[LoadError], words: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(head + whole[len(head) :])
    with pytest.raises(kind, match=words):
        open_gguf(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"none\.gguf"):
        open_gguf(tmp_path / "none.gguf")


def replaced_type(whole: bytes, tensor: str, kind: int) -> bytes:
    """The file with another type in the header of a two-dimensional tensor."""
    name = struct.pack("<Q", len(tensor)) + tensor.encode()
    position = whole.index(name) + len(name) + 4 + 2 * 8
    return whole[:position] + struct.pack("<I", kind) + whole[position + 4 :]


@pytest.mark.parametrize(("kind", "words"), [(Type.I32.value, "I32"), (Type.F64.value, "F64"), (4096, "4096")])
def test_a_type_that_cannot_be_dequantised(whole: bytes, tmp_path: Path, kind: int, words: str) -> None:
    path = tmp_path / "model.gguf"
    # The file has room for the eight bytes of an F64, since this is not its last tensor.
    path.write_bytes(replaced_type(whole, "token_embd.weight", kind))
    with pytest.raises(UnsupportedModel, match=rf"token_embd\.weight.*{words}"):
        open_gguf(path)


def test_a_row_that_is_no_whole_number_of_blocks(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(replaced_type(whole, "token_embd.weight", Type.Q4_K.value))
    with pytest.raises(CheckpointError, match=r"token_embd\.weight.*Q4_K"):
        open_gguf(path)


def test_a_tensor_that_is_there_twice(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(whole.replace(b"blk.0.attn_k.weight", b"blk.0.attn_v.weight"))
    with pytest.raises(CheckpointError, match=r"blk\.0\.attn_v\.weight is there twice"):
        open_gguf(path)


def test_a_later_part_of_a_split_model(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", {"split.count": 2}, {"token_embd.weight": np.ones((2, 2), "f4")})
    with pytest.raises(UnsupportedModel, match="several parts"):
        open_gguf(path)
