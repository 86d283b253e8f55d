"""The sizes of a step's device tensors, and the rows of a plan laid out for them."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from omni_async.backend.ops import StepRows
from omni_async.scheduler.plan import Row

FEW_SAMPLED = (8, 64)
"""Room for sampled rows in prompt steps, beside the most there can be."""

NOTHING: Mapping[int, tuple[int, int]] = {}
NO_BLOCK = (-1, 0)

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
        return 5 * self.num_rows + 1 + self.num_sampled

    def pack(self, rows: Sequence[Row], gained: Mapping[int, tuple[int, int]] = NOTHING) -> NDArray[np.int32]:
        """The rows as one array: slots, starts, new places, new blocks, query starts, indices of those that draw.

        `gained`: place and number, by slot, of a block that a row's slot gains in this step.
        """
        count, room = len(rows), self.num_rows
        packed = np.zeros(self.packed_size, np.int32)
        slots, starts, new_places, new_blocks = packed[: 4 * room].reshape(4, room)
        query_starts, sampled = packed[4 * room : 5 * room + 1], packed[5 * room + 1 :]
        slots[:count] = [row.slot for row in rows]
        slots[count:] = -1
        starts[:count] = [row.start for row in rows]
        new_places[:] = -1
        if gained:
            pairs = [gained.get(row.slot, NO_BLOCK) for row in rows]
            new_places[:count] = [place for place, _ in pairs]
            new_blocks[:count] = [block for _, block in pairs]
        ends = query_starts[1:]
        np.cumsum([row.length for row in rows], out=ends[:count])
        ends[count:] = ends[count - 1] if count else 0
        drawing = [i for i, row in enumerate(rows) if row.samples]
        sampled[: len(drawing)] = drawing
        sampled[len(drawing) :] = -1
        return packed

    def unpack(self, packed: Tensor) -> StepRows:
        """The parts of a packed array that is on the device."""
        room = self.num_rows
        parts = torch.split(packed, [room, room, room, room, room + 1, self.num_sampled])
        slots, starts, new_places, new_blocks, query_starts, sampled = parts
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
