"""The sampling parameters of all slots, resident on the device at fixed addresses."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from omni_async.backend.ops import SamplingBatch, SamplingTables, StepInputs
from omni_async.backend.slot_tables import Entry, SlotTables
from omni_async.sampling.params import MAX_BIAS, RowParams, SamplingNeeds

FLOATS, INTEGERS = 6, 8
"""Numbers of a slot's line."""

WORD = 32
"""Bits of one word of the masks of allowed tokens."""


class SamplingTable:
    """Parameters by slot: written when a sequence takes the slot, read in each step that samples it."""

    def __init__(self, slots: SlotTables, first: int, vocab_size: int, stage: int = 0) -> None:
        """The tables of `slots` from number `first` on, which have `widths`."""
        self._first = first
        self._stage = stage
        self._vocab_size = vocab_size
        lines, bias_ids, bias_until, bias_values, allowed = slots.tables[first : first + len(self.widths(vocab_size))]
        floats, integers = lines[:, :FLOATS].view(torch.float32).T, lines[:, FLOATS:].T
        lists = (bias_ids, bias_until, bias_values.view(torch.float32), allowed)
        self.tables = SamplingTables(*[*floats.unbind(), *integers.unbind(), *lists])

    @staticmethod
    def widths(vocab_size: int) -> list[int]:
        """Columns of the tables: a line of floats, as bit patterns, and integers; three lists of bias; a mask."""
        return [FLOATS + INTEGERS, MAX_BIAS, MAX_BIAS, MAX_BIAS, -(-vocab_size // WORD)]

    def entries(self, newcomers: Sequence[tuple[int, RowParams]]) -> list[Entry]:
        """The parameters of newcomers, by slot."""
        entries = []
        for slot, p in newcomers:
            entries.append(Entry(self._first, slot, 0, _line(p)))
            if p.bias:
                ids, values, until = zip(*p.bias, strict=True)
                patterns = np.array(values, np.float32).view(np.int32)
                lists = enumerate((np.array(ids, np.int32), np.array(until, np.int32), patterns), self._first + 1)
                entries += [Entry(table, slot, 0, numbers) for table, numbers in lists]
            if p.allowed is not None:
                entries.append(Entry(self._first + 4, slot, 0, _mask(p.allowed, self._vocab_size)))
        return entries

    def batch(self, inputs: StepInputs, tokens: Tensor, needs: SamplingNeeds, num_logprobs: int) -> SamplingBatch:
        """The rows that a step samples; `tokens [slots, max_len] int32` is the token pool, `needs` is by all rows."""
        return SamplingBatch(
            tables=self.tables,
            tokens=tokens,
            slots=inputs.sampled_slots,
            lengths=inputs.sampled_lengths,
            needs=needs,
            num_logprobs=num_logprobs,
            stage=self._stage,
        )


def _line(p: RowParams) -> NDArray[np.int32]:
    line = np.empty(FLOATS + INTEGERS, np.int32)
    line[:FLOATS].view(np.float32)[:] = (
        p.temperature,
        p.top_p,
        p.min_p,
        p.repetition_penalty,
        p.presence_penalty,
        p.frequency_penalty,
    )
    low, high = np.array([p.seed], np.int64).view(np.int32)
    line[FLOATS:] = (p.top_k, low, high, p.choice, p.prompt_len, len(p.bias), p.allowed is not None, p.num_logprobs)
    return line


def _mask(allowed: Sequence[int], vocab_size: int) -> NDArray[np.int32]:
    bits = np.zeros(-(-vocab_size // WORD) * WORD, np.bool_)
    bits[list(allowed)] = True
    return np.packbits(bits, bitorder="little").view("<i4")
