"""What the file formats have in common: a checkpoint is a config, defaults, a tokenizer and a stream of weights."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PretrainedConfig

from omni_async.errors import CheckpointError
from omni_async.loading.loaded import GenerationDefaults
from omni_async.loading.tokenizer import TextTokenizer
from omni_async.models.protocol import Weight


class StoredWeight(Weight, Protocol):
    """A weight that knows how much of its file it is."""

    @property
    def num_bytes(self) -> int:
        """Its size in the file."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """An opened and validated checkpoint; no weight of it is in memory yet."""

    config: PretrainedConfig
    dtype: torch.dtype | None
    """The dtype that it was made for; `None`: its weights are quantised."""
    tokenizer: TextTokenizer | None
    defaults: GenerationDefaults
    num_bytes: int
    """Of all weights, in the file."""
    weights: Callable[[], Iterator[StoredWeight]]
    """Each weight is valid until the next one is taken."""

    @property
    def architecture(self) -> str:
        """The class that the config names."""
        assert self.config.architectures
        return self.config.architectures[0]


def row_pieces(destination: Tensor, num_elements: int) -> Iterator[tuple[int, Tensor]]:
    """Consecutive views of some rows (first axis), of about `num_elements`, each with the index of its first row."""
    if destination.numel():
        rows = max(1, num_elements // destination[0].numel())
        for first in range(0, len(destination), rows):
            yield first, destination[first : first + rows]


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object that a file holds.

    Raises:
        CheckpointError: the file cannot be read or holds something else.
    """
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a JSON {type(value).__name__}, not an object")
    return value
