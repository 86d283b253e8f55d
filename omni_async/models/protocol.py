"""What a stage's model is to the runner: declared data (`ModelSpec`) and required methods. No probing."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from omni_async.backend.ops import Sampled, StepContext


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The paged key/value cache that a model needs."""

    num_layers: int
    num_kv_heads: int
    head_size: int


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What the runner must know of a model; read once, after construction."""

    hidden_size: int
    vocab_size: int
    """Ids at or above this are never drawn, even if the embedding has padding rows."""
    max_positions: int
    """Positions that the model was made for."""
    cache: CacheLayout


class Weight(Protocol):
    """One named tensor of a checkpoint, not yet in memory."""

    @property
    def name(self) -> str:
        """The checkpoint's name, as `transformers` writes it: `model.layers.0.mlp.up_proj.weight`."""
        ...

    @property
    def file(self) -> str:
        """Where it lies, for error messages."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        ...

    def copy_to(self, destination: Tensor, start: int = 0) -> None:
        """Write it into `destination` (any float dtype) without a second full copy in memory.

        A destination with fewer rows (first axis) takes those from `start` on.
        """
        ...


class StageModel(Protocol):
    """The model of one stage. `T` tokens of a step, `S` sampled rows, `H` the hidden size."""

    @property
    def spec(self) -> ModelSpec:
        """The model's declared facts."""
        ...

    def load(self, weights: Iterable[Weight]) -> None:
        """Copy checkpoint tensors into place, one at a time, and see that every parameter was written once.

        Raises:
            CheckpointError: a tensor is missing, unexpected, repeated or of the wrong shape.
        """
        ...

    def embed(self, step: StepContext) -> Tensor:
        """The first layer's input, `[T, H]`, for the step's token ids."""
        ...

    def forward(self, x: Tensor, step: StepContext) -> Tensor:
        """Run all layers on `[T, H]`, which may be overwritten; writes the step's keys and values; returns `[T, H]`."""
        ...

    def logits(self, h: Tensor, step: StepContext) -> Tensor:
        """Raw logits `[S, vocab_size]`, in the run dtype or float32, of hidden rows `[S, H]`."""
        ...

    def sample(self, h: Tensor, step: StepContext) -> Sampled:
        """Choose one token for each hidden row `[S, H]` under the step's sampling batch."""
        ...
