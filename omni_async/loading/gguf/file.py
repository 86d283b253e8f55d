"""The layout of a GGUF file: metadata, then tensor headers, then the tensors' bytes, which stay on disk.

`gguf.GGUFReader` reads the same, but makes an array object of every string of the vocabulary: seconds, and more
memory than a small model's weights. What the types mean and how they are dequantised is the library's.
"""

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from numpy.typing import NDArray

from omni_async.errors import CheckpointError, UnsupportedModel

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4

SCALARS: Mapping[int, str] = {
    GGUFValueType.UINT8: "<B",
    GGUFValueType.INT8: "<b",
    GGUFValueType.UINT16: "<H",
    GGUFValueType.INT16: "<h",
    GGUFValueType.UINT32: "<I",
    GGUFValueType.INT32: "<i",
    GGUFValueType.UINT64: "<Q",
    GGUFValueType.INT64: "<q",
    GGUFValueType.FLOAT32: "<f",
    GGUFValueType.FLOAT64: "<d",
    GGUFValueType.BOOL: "<?",
}

T = TypeVar("T", bool, int, float, str, list[object])


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """A tensor as it lies in the file."""

    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    """Outermost axis first; the file has them the other way round."""
    data: NDArray[np.uint8]
    """`[*shape[:-1], bytes of a row] uint8`, memory-mapped."""


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """The metadata and the tensors of a file."""

    path: Path
    metadata: Mapping[str, object]
    tensors: Mapping[str, GGUFTensor]

    def get(self, key: str, kind: type[T]) -> T | None:
        """A metadata value; `None` if the file does not have it.

        Raises:
            CheckpointError: it is of another kind.
        """
        value = self.metadata.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and kind is float:
            value = float(value)
        if value is None or type(value) is kind:
            return value
        raise CheckpointError(
            f"{self.path}: metadata {key} is a {type(value).__name__}, not {kind.__name__}: {value!r:.80}"
        )

    def require(self, key: str, kind: type[T]) -> T:
        """A metadata value that must be there.

        Raises:
            CheckpointError: it is missing or of another kind.
        """
        value = self.get(key, kind)
        if value is None:
            raise CheckpointError(f"{self.path}: metadata {key} is missing")
        return value


class _Cursor:
    """Reads values one after another."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.position = 0

    def need(self, size: int, what: str) -> None:
        """See that the file has `size` more bytes."""
        if size > len(self.data) - self.position:
            raise CheckpointError(
                f"{self.path}: truncated or corrupt: {what} needs {size} bytes at byte {self.position}, "
                f"but the file has only {len(self.data)}"
            )

    def skip(self, size: int, what: str) -> int:
        """Step over `size` bytes and return where they begin."""
        self.need(size, what)
        self.position += size
        return self.position - size

    def scalar(self, layout: str, what: str) -> bool | int | float:
        value: bool | int | float
        (value,) = struct.unpack_from(layout, self.data, self.skip(struct.calcsize(layout), what))
        return value

    def integer(self, layout: str, what: str) -> int:
        return int(self.scalar(layout, what))

    def string(self, what: str) -> str:
        size = self.integer("<Q", what)
        begin = self.skip(size, what)
        try:
            return self.data[begin : begin + size].decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.path}: {what} is not UTF-8: {error}") from error

    def value(self, kind: int, what: str) -> object:
        if kind == GGUFValueType.STRING:
            return self.string(what)
        if kind == GGUFValueType.ARRAY:
            return self.array(what)
        return self.scalar(self.layout(kind, what), what)

    def array(self, what: str) -> list[object]:
        kind, count = self.integer("<I", what), self.integer("<Q", what)
        if kind == GGUFValueType.STRING:
            self.need(8 * count, what)  # a corrupt count must not fill the memory before it is noticed
            return [self.string(what) for _ in range(count)]
        layout = self.layout(kind, what)
        begin = self.skip(struct.calcsize(layout) * count, what)
        values: list[object] = np.frombuffer(self.data, layout, count, begin).tolist()
        return values

    def layout(self, kind: int, what: str) -> str:
        if kind not in SCALARS:
            raise CheckpointError(f"{self.path}: {what} is of the unknown type {kind}")
        return SCALARS[kind]


def read_gguf(path: Path) -> GGUFFile:
    """Read everything but the tensors' bytes, and see that these are there.

    Raises:
        CheckpointError: the file is missing, truncated or corrupt.
        UnsupportedModel: its version, its byte order or a tensor's type is unknown.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size < len(MAGIC):
                raise CheckpointError(f"{path}: not a GGUF file: it has {size} bytes")
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    cursor = _Cursor(path, data)
    _check_version(cursor)
    num_tensors = cursor.integer("<Q", "the number of tensors")
    num_metadata = cursor.integer("<Q", "the number of metadata entries")
    metadata: dict[str, object] = {}
    for i in range(num_metadata):
        key = cursor.string(f"the key of metadata entry {i}")
        if key in metadata:
            raise CheckpointError(f"{path}: metadata {key} is there twice")
        metadata[key] = cursor.value(cursor.integer("<I", f"the type of metadata {key}"), f"metadata {key}")
    return GGUFFile(path, metadata, _read_tensors(cursor, num_tensors, metadata))


def _check_version(cursor: _Cursor) -> None:
    if cursor.data[cursor.skip(len(MAGIC), "the magic number") : cursor.position] != MAGIC:
        raise CheckpointError(f"{cursor.path}: not a GGUF file: it begins with {cursor.data[: len(MAGIC)]!r}")
    version = cursor.integer("<I", "the version")
    if version not in VERSIONS:
        order = ", or the file's byte order is not little-endian" if version % 2**16 == 0 else ""
        raise UnsupportedModel(f"{cursor.path}: GGUF version {version} is not one of {VERSIONS}{order}")


def _read_tensors(cursor: _Cursor, count: int, metadata: Mapping[str, object]) -> dict[str, GGUFTensor]:
    headers = [_read_tensor_header(cursor, i) for i in range(count)]
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment % 8:
        raise CheckpointError(f"{cursor.path}: general.alignment must be a multiple of 8, got {alignment!r}")
    base = -(-cursor.position // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for name, kind, shape, offset in headers:
        if name in tensors:
            raise CheckpointError(f"{cursor.path}: tensor {name} is there twice")
        block_size, block_bytes = GGML_QUANT_SIZES[kind]
        if shape[-1] % block_size or offset % alignment:
            raise CheckpointError(
                f"{cursor.path}: tensor {name}: rows of {shape[-1]} in blocks of {block_size} of {kind.name}, "
                f"at offset {offset} with an alignment of {alignment}"
            )
        rows = (*shape[:-1], shape[-1] // block_size * block_bytes)
        cursor.position = base + offset
        begin = cursor.skip(math.prod(rows), f"tensor {name}")
        data = np.frombuffer(cursor.data, np.uint8, math.prod(rows), begin).reshape(rows)
        tensors[name] = GGUFTensor(name, kind, shape, data)
    return tensors


def _read_tensor_header(cursor: _Cursor, i: int) -> tuple[str, GGMLQuantizationType, tuple[int, ...], int]:
    name = cursor.string(f"the name of tensor {i}")
    what = f"the header of tensor {name}"
    num_dimensions = cursor.integer("<I", what)
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        raise CheckpointError(
            f"{cursor.path}: tensor {name} has {num_dimensions} dimensions; 1 to {MAX_DIMENSIONS} are possible"
        )
    shape = tuple(cursor.integer("<Q", what) for _ in range(num_dimensions))[::-1]
    kind = cursor.integer("<I", what)
    try:
        known = GGMLQuantizationType(kind)
    except ValueError as error:
        raise UnsupportedModel(f"{cursor.path}: tensor {name} is of the unknown type {kind}") from error
    return name, known, shape, cursor.integer("<Q", what)
