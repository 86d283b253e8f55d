"""The sampling parameters of all slots, resident on the device at fixed addresses."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from omni_async.backend.ops import SamplingBatch, SamplingTables, StepInputs
from omni_async.sampling.params import MAX_BIAS, RowParams, SamplingNeeds

FLOATS = 6
WORD = 32
"""Bits of one word of the masks of allowed tokens."""


class SamplingTable:
    """Parameters by slot: written when a sequence takes the slot, read in each step that samples it.

    Writing is in two parts: `pack` makes the arrays on the host, `apply` writes them once they are on the device.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device, stage: int = 0) -> None:
        self._stage = stage
        self._num_words = -(-vocab_size // WORD)
        # Floats first, as bit patterns, then integers: a slot is one line, so a newcomer is one line to write.
        self._lines = torch.zeros((num_slots, FLOATS + 8), dtype=torch.int32, device=device)
        self._bias_ids = torch.zeros((num_slots, MAX_BIAS), dtype=torch.int32, device=device)
        self._bias_until = torch.zeros_like(self._bias_ids)
        self._bias_values = torch.zeros((num_slots, MAX_BIAS), dtype=torch.float32, device=device)
        self._allowed = torch.zeros((num_slots, self._num_words), dtype=torch.int32, device=device)
        floats, integers = self._lines.view(torch.float32)[:, :FLOATS].T, self._lines[:, FLOATS:].T
        lists = (self._bias_ids, self._bias_until, self._bias_values, self._allowed)
        self.tables = SamplingTables(*[*floats.unbind(), *integers.unbind(), *lists])

    def pack(self, newcomers: Sequence[tuple[int, RowParams]]) -> list[NDArray[np.int32]]:
        """The parameters of newcomers, by slot, for `apply`."""
        if not newcomers:
            return [np.empty((0, 1), np.int32)] * 3
        slots, params = zip(*newcomers, strict=True)
        lines = np.empty((len(slots), 1 + FLOATS + 8), np.int32)
        lines[:, 0] = slots
        lines[:, 1 : 1 + FLOATS].view(np.float32)[:] = [
            (
                p.temperature,
                p.top_p,
                p.min_p,
                p.repetition_penalty,
                p.presence_penalty,
                p.frequency_penalty,
            )
            for p in params
        ]
        seeds = np.array([p.seed for p in params], np.int64)
        integers = [
            (p.top_k, 0, 0, p.choice, p.prompt_len, len(p.bias), p.allowed is not None, p.num_logprobs) for p in params
        ]
        lines[:, 1 + FLOATS :] = integers
        lines[:, 2 + FLOATS] = seeds.astype(np.int32)  # wraps around: the lower half
        lines[:, 3 + FLOATS] = seeds >> 32
        return [lines, _pack_bias(newcomers), self._pack_allowed(newcomers)]

    def apply(self, lines: Tensor, bias: Tensor, allowed: Tensor) -> None:
        """Write what `pack` made."""
        if len(lines):
            self._lines[lines[:, 0]] = lines[:, 1:]
        if len(bias):
            at = bias[:, 0]
            ids, until, values = bias[:, 1:].chunk(3, dim=1)
            self._bias_ids[at, : ids.shape[1]] = ids
            self._bias_until[at, : ids.shape[1]] = until
            self._bias_values[at, : ids.shape[1]] = values.view(torch.float32)
        if len(allowed):
            self._allowed[allowed[:, 0]] = allowed[:, 1:]

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

    def _pack_allowed(self, newcomers: Sequence[tuple[int, RowParams]]) -> NDArray[np.int32]:
        restricted = [(slot, p.allowed) for slot, p in newcomers if p.allowed is not None]
        packed = np.zeros((len(restricted), 1 + self._num_words), np.int32)
        for row, (slot, ids) in enumerate(restricted):
            bits = np.zeros(self._num_words * WORD, np.bool_)
            bits[list(ids)] = True
            packed[row, 0] = slot
            packed[row, 1:] = np.packbits(bits, bitorder="little").view("<i4")
        return packed


def _pack_bias(newcomers: Sequence[tuple[int, RowParams]]) -> NDArray[np.int32]:
    """A line for each row that has biases: slot, ids, ends, values; shorter lists are filled up with zeros."""
    biased = [(slot, p.bias) for slot, p in newcomers if p.bias]
    width = max([len(bias) for _, bias in biased], default=0)
    packed = np.zeros((len(biased), 1 + 3 * width), np.int32)
    for row, (slot, bias) in enumerate(biased):
        ids, values, until = zip(*bias, strict=True)
        packed[row, 0] = slot
        parts = packed[row, 1:].reshape(3, width)
        parts[0, : len(bias)] = ids
        parts[1, : len(bias)] = until
        parts[2, : len(bias)] = np.array(values, np.float32).view(np.int32)
    return packed
