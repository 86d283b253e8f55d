"""Tables with a line for each slot in one piece of device memory: what newcomers bring is one copy and one write."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT = 4
"""Integers: each table begins at a multiple of 16 bytes, as kernels are compiled for an alignment."""

MAX_SIZE = 2**31 - 1
"""Integers of all tables together: entries are addressed by 32 bits."""


class Entry(NamedTuple):
    """Values for a part of one line."""

    table: int
    slot: int
    first: int
    """The column of the first value."""
    values: Sequence[int] | NDArray[np.int32]


class SlotTables:
    """Tables `[slots, width] int32`, filled with zeros at first.

    Raises:
        ValueError: they are larger than 2**31 - 1 integers together.
    """

    def __init__(self, num_slots: int, widths: Sequence[int], device: torch.device) -> None:
        self._widths = list(widths)
        rooms = [-(-num_slots * width // ALIGNMENT) * ALIGNMENT for width in widths]
        size = sum(rooms)
        if size > MAX_SIZE:
            raise ValueError(f"tables of {num_slots} slots with {sum(widths)} integers each: more than {MAX_SIZE}")
        self._memory = torch.zeros(size, dtype=torch.int32, device=device)
        self._firsts = np.cumsum([0, *rooms[:-1]]).tolist()
        self.tables = [
            self._memory[first : first + num_slots * width].view(num_slots, width)
            for first, width in zip(self._firsts, widths, strict=True)
        ]
        """By number, at fixed addresses."""

    def pack(self, entries: Sequence[Entry]) -> NDArray[np.int32]:
        """Entries as `[2, n]`: where each value goes, and the values; no place may occur twice."""
        counts = [len(entry.values) for entry in entries]
        packed = np.empty((2, sum(counts)), np.int32)
        at = 0
        for (table, slot, first, values), count in zip(entries, counts, strict=True):
            place = self._firsts[table] + slot * self._widths[table] + first
            packed[0, at : at + count] = np.arange(place, place + count)
            packed[1, at : at + count] = values
            at += count
        return packed

    def write(self, packed: Tensor) -> None:
        """Write what `pack` made, once it is on the device."""
        self._memory[packed[0]] = packed[1]
