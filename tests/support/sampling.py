"""Batches for the sampler, made through the real parameter table."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from omni_async.backend.ops import SamplingBatch
from omni_async.backend.slot_tables import SlotTables
from omni_async.sampling.params import RowParams, SamplingNeeds, check, needs, resolve
from omni_async.sampling.table import SamplingTable
from omni_async.types import SamplingParams


@dataclass(frozen=True)
class Defaults:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True)
class Ask:
    """One row: its parameters and the tokens before the one to be drawn."""

    params: SamplingParams
    prompt: Sequence[int] = (0,)
    answer: Sequence[int] = ()
    eos: Sequence[int] = ()
    choice: int = 0

    def row(self, vocab_size: int) -> RowParams:
        check(self.params, vocab_size)
        seed = self.params.seed or 0
        return resolve(self.params, Defaults(), vocab_size, self.eos, len(self.prompt), seed, self.choice)


def ask(prompt: Sequence[int] = (0,), answer: Sequence[int] = (), eos: Sequence[int] = (), **params: object) -> Ask:
    return Ask(SamplingParams(**params), prompt, answer, eos)  # type: ignore[arg-type]


class Table(SamplingTable):
    """Sampling parameters whose tables are the only ones."""

    def __init__(self, num_slots: int, vocab_size: int, device: str = "cpu") -> None:
        self.slots = SlotTables(num_slots, self.widths(vocab_size), torch.device(device))
        super().__init__(self.slots, 0, vocab_size)

    def write(self, rows: Sequence[tuple[int, RowParams]]) -> None:
        """What the runner does when sequences take slots."""
        self.slots.write(torch.from_numpy(self.slots.pack(self.entries(rows))))


def batch_of(rows: Sequence[Ask], vocab_size: int, num_logprobs: int = -1) -> SamplingBatch:
    """All rows in one batch, in slots of their own; what lies past a row's tokens in the pool is another's."""
    table = Table(len(rows), vocab_size)
    made = [row.row(vocab_size) for row in rows]
    slots = list(reversed(range(len(rows))))
    table.write(list(zip(slots, made, strict=True)))
    lengths = torch.tensor([len(row.prompt) + len(row.answer) for row in rows])
    tokens = torch.full((len(rows), int(lengths.max()) + 3), vocab_size - 1, dtype=torch.int32)
    for slot, row in zip(slots, rows, strict=True):
        known = [*row.prompt, *row.answer]
        tokens[slot, : len(known)] = torch.tensor(known, dtype=torch.int32)
    union = SamplingNeeds.NONE
    for row_params in made:
        union |= needs(row_params)
    return SamplingBatch(table.tables, tokens, torch.tensor(slots), lengths, union, num_logprobs)


def draws_of(params: SamplingParams, vocab_size: int, count: int, eos: Sequence[int] = ()) -> SamplingBatch:
    """One row's batch at `count` successive output indices."""
    row = Ask(params, eos=eos).row(vocab_size)
    table = Table(1, vocab_size)
    table.write([(0, row)])
    lengths = torch.arange(count) + row.prompt_len
    tokens = torch.zeros((1, 1), dtype=torch.int32)
    return SamplingBatch(table.tables, tokens, torch.zeros(count, dtype=torch.int64), lengths, needs(row), -1)
