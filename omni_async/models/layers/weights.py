"""Puts checkpoint tensors where the layers want them, and sees that each place was written once.

Layers declare a *destination* for every checkpoint name that belongs to them: the view of a parameter that the
tensor fills, such as the query rows of a fused matrix.
"""

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from omni_async.errors import CheckpointError
from omni_async.models.protocol import Weight

Destinations = Iterator[tuple[str, Tensor]]
"""Pairs of a checkpoint name and the view that it fills."""

IGNORED_SUFFIX = "rotary_emb.inv_freq"
"""Old checkpoints store this table, which follows from the config."""

COMPARED_BYTES = 2**22
"""Size of the buffer through which a second copy of a tied tensor is compared."""

LISTED = 4
"""Missing tensors that an error names."""


@dataclass(frozen=True, slots=True)
class Tie:
    """Two checkpoint names of one parameter; if their tensors differ, `name` is used."""

    name: str
    alias: str


def load_weights(destinations: Destinations, weights: Iterable[Weight], tie: Tie | None = None) -> None:
    """Copy every weight to its destination.

    Raises:
        CheckpointError: a tensor is missing, unexpected, repeated or of the wrong shape.
    """
    places = dict(destinations)
    loaded: dict[str, str] = {}
    for weight in weights:
        if weight.name.endswith(IGNORED_SUFFIX):
            continue
        name = tie.name if tie is not None and weight.name == tie.alias else weight.name
        if name not in places:
            raise CheckpointError(f"{weight.file}: unexpected tensor {weight.name}; the model has no such parameter")
        if weight.name in loaded:
            raise CheckpointError(f"{weight.file}: tensor {weight.name} is already loaded from {loaded[weight.name]}")
        place = places[name]
        if weight.shape != tuple(place.shape):
            raise CheckpointError(
                f"{weight.file}: tensor {weight.name} has shape {list(weight.shape)}, "
                f"the model needs {list(place.shape)}"
            )
        if tie is not None and name == tie.name and loaded.keys() & {tie.name, tie.alias}:
            _load_second(weight, place, tie)
        else:
            weight.copy_to(place)
        loaded[weight.name] = weight.file
    missing = [name for name in places if name not in loaded]
    if missing:
        listed = ", ".join(missing[:LISTED]) + (f" and {len(missing) - LISTED} more" if len(missing) > LISTED else "")
        files = ", ".join(sorted(set(loaded.values()))) or "the checkpoint"
        raise CheckpointError(f"{files}: missing tensor{'s' if len(missing) > 1 else ''} {listed}")


def _load_second(weight: Weight, place: Tensor, tie: Tie) -> None:
    """Compare the second of two tied tensors with the first, in place, and keep `tie.name`'s."""
    rows = max(1, COMPARED_BYTES // (place[0].numel() * place.element_size()))
    buffer = torch.empty_like(place[:rows])
    differs = False
    for start in range(0, len(place), rows):
        present = place[start : start + rows]
        part = buffer[: len(present)]
        weight.copy_to(part, start)
        differs |= not torch.equal(part, present)
        if weight.name == tie.name:
            present.copy_(part)
    if differs:
        warnings.warn(
            f"{weight.file}: {tie.alias} differs from {tie.name}, but the config ties them; {tie.name} is used",
            stacklevel=2,
        )
