"""Weights in `.safetensors` files: one file, or shards with an index (https://huggingface.co/docs/safetensors)."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from omni_async.errors import CheckpointError, UnsupportedModel
from omni_async.loading.checkpoint import read_json_object, row_pieces

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
PIECE_ELEMENTS = 2**22
"""Elements copied at a time; bounds the buffer that a copy to another device with another dtype needs."""

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class _StoredTensor(Protocol):
    """A tensor of an open file; indexing it reads rows."""

    def __getitem__(self, rows: slice) -> Tensor: ...
    def get_shape(self) -> list[int]: ...
    def get_dtype(self) -> str: ...


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """What a file's header says of one tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Its size in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class SafetensorsWeight:
    """A `Weight` in a memory-mapped file."""

    name: str
    file: str
    shape: tuple[int, ...]
    num_bytes: int
    stored: _StoredTensor

    def copy_to(self, destination: Tensor, start: int = 0) -> None:
        """Write rows `start` and following into `destination`, as many as it has."""
        for first, piece in row_pieces(destination, PIECE_ELEMENTS):
            piece.copy_(self.stored[start + first : start + first + len(piece)])


@dataclass(frozen=True, slots=True)
class SafetensorsFiles:
    """The validated headers of a checkpoint's files, by path and tensor name."""

    headers: Mapping[Path, Mapping[str, TensorHeader]]

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return sum(header.num_bytes for headers in self.headers.values() for header in headers.values())

    @property
    def first_dtype(self) -> torch.dtype | None:
        """Of the first tensor; `None`: there is none."""
        return next((header.dtype for headers in self.headers.values() for header in headers.values()), None)

    def weights(self) -> Iterator[SafetensorsWeight]:
        """Every tensor, file by file."""
        for path, headers in self.headers.items():
            with _opened(path) as file:
                for name, header in headers.items():
                    yield SafetensorsWeight(name, str(path), header.shape, header.num_bytes, file.get_slice(name))


def find_safetensors(folder: Path) -> SafetensorsFiles:
    """Find a folder's weights and validate every header, before anything is copied.

    Raises:
        CheckpointError: a file is missing, truncated or corrupt, or does not hold what the index says.
        UnsupportedModel: the weights are in another format, or of a dtype that is not built in.
    """
    single = folder / SINGLE_FILE
    if single.is_file():
        return SafetensorsFiles({single: _read_header(single)})
    index = folder / INDEX_FILE
    if index.is_file():
        return _read_shards(folder, index)
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLE_SUFFIXES)
    if pickles:
        raise UnsupportedModel(
            f"{folder}: {', '.join(pickles)}: pickle files can run code when they are read and are not loaded; "
            "convert the weights to safetensors"
        )
    raise CheckpointError(f"{folder}: neither {SINGLE_FILE} nor {INDEX_FILE} is there")


def _read_shards(folder: Path, index: Path) -> SafetensorsFiles:
    placement = _read_index(index)
    for tensor, shard in placement.items():
        if not (folder / shard).is_file():
            raise CheckpointError(f"{folder / shard}: the file is missing; {index.name} places tensor {tensor} in it")
    found = {shard: _read_header(folder / shard) for shard in dict.fromkeys(placement.values())}
    holders: dict[str, str] = {}
    for shard, headers in found.items():
        for tensor in headers:
            if tensor in holders:
                raise CheckpointError(f"{folder / shard}: tensor {tensor} is also in {holders[tensor]}")
            if tensor not in placement:
                raise CheckpointError(f"{folder / shard}: tensor {tensor} is not listed in {index.name}")
            holders[tensor] = shard
    for tensor, shard in placement.items():
        if holders.get(tensor) != shard:
            raise CheckpointError(f"{folder / shard}: tensor {tensor} is not in it, though {index.name} says so")
    return SafetensorsFiles({folder / shard: headers for shard, headers in found.items()})


def _read_index(index: Path) -> dict[str, str]:
    """The shard in which an index places each tensor."""
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map must be a non-empty JSON object, got {weight_map!r}")
    for tensor, shard in weight_map.items():
        # A shard may be a link (download caches use them), but its name must not lead out of the folder.
        if not isinstance(shard, str) or PurePath(shard).name != shard or "\\" in shard or shard in ("", ".."):
            raise CheckpointError(f"{index}: tensor {tensor}: {shard!r} is not the name of a file in the folder")
    return weight_map


def _opened(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path}: not a complete safetensors file ({path.stat().st_size} bytes): {error}"
        ) from error


def _read_header(path: Path) -> dict[str, TensorHeader]:
    headers: dict[str, TensorHeader] = {}
    with _opened(path) as file:
        for name in sorted(file.keys()):
            stored: _StoredTensor = file.get_slice(name)
            dtype = DTYPES.get(stored.get_dtype())
            if dtype is None:
                raise UnsupportedModel(
                    f"{path}: tensor {name} is stored as {stored.get_dtype()}, which is not one of {', '.join(DTYPES)}"
                )
            headers[name] = TensorHeader(tuple(stored.get_shape()), dtype)
    return headers
