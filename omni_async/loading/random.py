"""Random weights of a model's real shapes: they cost what trained ones cost, and need no file."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from omni_async.errors import UnsupportedModel
from omni_async.models.layers.causal_lm import CausalLM
from omni_async.models.protocol import StageModel

STD = 0.02
"""The `initializer_range` of the families' configs."""

SEED = 0
SOURCE = "random weights"


@dataclass(frozen=True, slots=True)
class RandomWeight:
    """A `StoredWeight` that is drawn where it belongs, on the device and in the run dtype.

    Matrices and biases are normal with deviation `STD`, the other vectors, which are those of norms, are ones.
    """

    name: str
    shape: tuple[int, ...]
    num_bytes: int
    generator: torch.Generator
    file: str = SOURCE

    def copy_to(self, destination: Tensor, start: int = 0) -> None:
        """Draw `destination`; `start` makes no difference to random numbers."""
        if len(self.shape) == 1 and not self.name.endswith(".bias"):
            destination.fill_(1.0)
        else:
            destination.normal_(0.0, STD, generator=self.generator)


class RandomWeights:
    """The weights of a model, drawn one after another: on one kind of device the same seed gives the same ones.

    Raises:
        UnsupportedModel: the model does not say which tensors it has.
    """

    def __init__(self, model: StageModel, device: torch.device, seed: int = SEED) -> None:
        if not isinstance(model, CausalLM):
            raise UnsupportedModel(f"{type(model).__name__}: random weights are built in for text models only")
        self._places = dict(model.destinations())
        self._generator = torch.Generator(device).manual_seed(seed)
        self.num_bytes = sum(place.nbytes for place in self._places.values())
        """Of all weights, in the run dtype."""

    def __iter__(self) -> Iterator[RandomWeight]:
        for name, place in self._places.items():
            yield RandomWeight(name, tuple(place.shape), place.nbytes, self._generator)
