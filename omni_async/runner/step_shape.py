"""The sizes of a step's device tensors, and the rows of a plan laid out for them."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from omni_async.backend.ops import StepRows
from omni_async.scheduler.plan import Row

FEW_SAMPLED = (8, 64)
"""Room for sampled rows in prompt steps, beside the most there can be."""

NOTHING: Mapping[int, tuple[int, int]] = {}

LEAST_TOKENS = 16
"""Room for tokens in the smallest prompt step."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """Room for tokens, rows and sampled rows in the tensors of a step; what a plan leaves over is padding."""

    num_tokens: int
    num_rows: int
    num_sampled: int
    single: bool
    """No row has more than one token."""

    @property
    def packed_size(self) -> int:
        """Integers of the packed rows."""
        return sum(self._rooms)

    @property
    def _rooms(self) -> list[int]:
        """Integers of each part; each begins at a multiple of 16 bytes, as kernels are compiled for an alignment."""
        return [-(-size // 4) * 4 for size in self._sizes]

    @property
    def _sizes(self) -> list[int]:
        return [self.num_rows] * 4 + [self.num_rows + 1, self.num_sampled]

    def pack(self, rows: Sequence[Row], gained: Mapping[int, tuple[int, int]] = NOTHING) -> NDArray[np.int32]:
        """The rows as one array: slots, starts, new places, new blocks, query starts, indices of those that draw.

        `gained`: place and number, by slot, of a block that a row's slot gains in this step.
        """
        count = len(rows)
        packed = np.zeros(self.packed_size, np.int32)
        _, *bounds = accumulate(self._rooms, initial=0)
        slots, starts, new_places, new_blocks, query_starts, sampled = (
            packed[end - room : end] for end, room in zip(bounds, self._rooms, strict=True)
        )
        slots[count:] = new_places[:] = sampled[:] = -1
        if not rows:
            return packed
        # Lists of numbers: iterators over rows would be hundreds of objects, which start garbage collections.
        row_slots = [row.slot for row in rows]
        slots[:count] = row_slots
        starts[:count] = [row.start for row in rows]
        np.cumsum([row.length for row in rows], out=query_starts[1 : count + 1])
        query_starts[count + 1 :] = query_starts[count]
        drawing = [index for index, row in enumerate(rows) if row.samples]
        sampled[: len(drawing)] = drawing
        if gained:
            index = dict(zip(row_slots, range(count), strict=True))
            for slot, (place, block) in gained.items():
                new_places[index[slot]] = place
                new_blocks[index[slot]] = block
        return packed

    def unpack(self, packed: Tensor) -> StepRows:
        """The parts of a packed array that is on the device."""
        parts = torch.split(packed, self._rooms)
        slots, starts, new_places, new_blocks, query_starts, sampled = (
            part[:size] for part, size in zip(parts, self._sizes, strict=True)
        )
        return StepRows(slots, starts, query_starts, new_places, new_blocks, sampled, self.num_tokens, self.single)


class Buckets:
    """The shapes that steps are captured in: some sizes for each kind of step, so that padding stays small."""

    def __init__(self, max_tokens: int, max_rows: int) -> None:
        self._max_rows = max_rows
        self._singles = _sizes(max_rows)
        self._tokens = [size for size in _sizes(max_tokens) if size >= min(LEAST_TOKENS, max_tokens)]
        self._sampled = sorted({min(size, max_rows) for size in (*FEW_SAMPLED, max_rows)})
        shapes = {_single(rows) for rows in self._singles}
        shapes |= {self._mixed(tokens, sampled) for tokens in self._tokens for sampled in self._sampled}
        self.shapes = sorted(shapes, key=lambda s: (s.num_tokens, s.num_sampled, s.single), reverse=True)
        """All of them, the largest first."""

    def find(self, num_tokens: int, num_rows: int, num_sampled: int) -> StepShape | None:
        """The smallest shape that has room for a step; `None` if none has."""
        if num_tokens > self._tokens[-1] or num_rows > self._max_rows:
            return None
        if num_tokens == num_rows:
            return _single(_at_least(self._singles, num_rows))
        return self._mixed(_at_least(self._tokens, num_tokens), _at_least(self._sampled, num_sampled))

    def _mixed(self, num_tokens: int, num_sampled: int) -> StepShape:
        num_rows = min(num_tokens, self._max_rows)
        return StepShape(num_tokens, num_rows, min(num_sampled, num_rows), single=False)


def _single(num_rows: int) -> StepShape:
    return StepShape(num_rows, num_rows, num_rows, single=True)


def _at_least(sizes: list[int], size: int) -> int:
    return sizes[bisect_left(sizes, size)]


def _sizes(largest: int) -> list[int]:
    """1, 2, 4, 8, 16, 24, 32, 48, 64, 96, ... and `largest`."""
    sizes = [1, 2, 4, 8]
    while sizes[-1] < largest:
        power = 1 << (sizes[-1].bit_length() - 1)
        sizes.append(2 * power if sizes[-1] > power or power < 16 else 3 * power // 2)
    return [size for size in sizes if size < largest] + [largest]
