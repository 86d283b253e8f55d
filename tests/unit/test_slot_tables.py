"""Tables by slot that are written by one list of entries."""

from array import array

import numpy as np
import pytest
import torch

from omni_async.backend.slot_tables import Entry, SlotTables

CPU = torch.device("cpu")


def test_entries_go_where_they_belong_and_nowhere_else() -> None:
    slots = SlotTables(3, [5, 1, 4], CPU)
    entries = [
        Entry(0, 2, 1, array("i", [7, 8, 9])),
        Entry(1, 0, 0, (4,)),
        Entry(2, 1, 0, np.array([1, -2, 3, -4], np.int32)),
        Entry(0, 0, 0, []),
    ]
    slots.write(torch.from_numpy(slots.pack(entries)))
    first, second, third = slots.tables
    assert first.tolist() == [[0] * 5, [0] * 5, [0, 7, 8, 9, 0]]
    assert second.tolist() == [[4], [0], [0]]
    assert third.tolist() == [[0] * 4, [1, -2, 3, -4], [0] * 4]


def test_every_table_is_aligned_and_contiguous() -> None:
    base, *others = SlotTables(3, [5, 1, 7, 2], CPU).tables
    assert base.is_contiguous()
    for table in others:
        assert table.is_contiguous()
        assert (table.data_ptr() - base.data_ptr()) % 16 == 0


def test_what_32_bits_cannot_address_is_refused() -> None:
    with pytest.raises(ValueError, match="65536 slots with 40000 integers each"):
        SlotTables(65536, [32768, 7232], torch.device("meta"))
