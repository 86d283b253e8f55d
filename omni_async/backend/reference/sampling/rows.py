"""The parameters of the rows to be sampled, gathered from the slots' tables, as the reference sampler reads them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from omni_async.backend.ops import SamplingBatch

WORD = 32
"""Bits of one word of the masks of allowed tokens."""


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """See `SamplingTables`; here everything is by row, `[S]` int64 or f32."""

    slots: Tensor
    lengths: Tensor
    prompt_lens: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    repetition_penalty: Tensor
    presence_penalty: Tensor
    frequency_penalty: Tensor
    seed: Tensor
    choice: Tensor

    @classmethod
    def of(cls, batch: SamplingBatch) -> "SamplingRows":
        """Gather a batch's rows."""
        tables, slots = batch.tables, batch.slots
        return cls(
            slots=slots,
            lengths=batch.lengths,
            prompt_lens=tables.prompt_lens[slots].long(),
            temperature=tables.temperature[slots],
            top_k=tables.top_k[slots].long(),
            top_p=tables.top_p[slots],
            min_p=tables.min_p[slots],
            repetition_penalty=tables.repetition_penalty[slots],
            presence_penalty=tables.presence_penalty[slots],
            frequency_penalty=tables.frequency_penalty[slots],
            seed=tables.seed_high[slots].long() << 32 | (tables.seed_low[slots].long() & 0xFFFFFFFF),
            choice=tables.choice[slots].long(),
        )

    def take(self, rows: Tensor) -> "SamplingRows":
        """Some of the rows."""
        return SamplingRows(
            slots=self.slots[rows],
            lengths=self.lengths[rows],
            prompt_lens=self.prompt_lens[rows],
            temperature=self.temperature[rows],
            top_k=self.top_k[rows],
            top_p=self.top_p[rows],
            min_p=self.min_p[rows],
            repetition_penalty=self.repetition_penalty[rows],
            presence_penalty=self.presence_penalty[rows],
            frequency_penalty=self.frequency_penalty[rows],
            seed=self.seed[rows],
            choice=self.choice[rows],
        )


def allowed_mask(batch: SamplingBatch, vocab_size: int) -> Tensor:
    """`[S, V] bool`: which tokens each row may draw; all where a row is not restricted."""
    words = batch.tables.allowed[batch.slots]
    bits = (words[..., None] >> torch.arange(WORD, dtype=torch.int32, device=words.device)) & 1
    mask = bits.flatten(1)[:, :vocab_size].bool()
    return mask | (batch.tables.restricted[batch.slots] == 0)[:, None]
