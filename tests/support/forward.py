"""Runs a `StageModel` over token sequences, step by step, as the runner would: paged cache, scattered blocks."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from omni_async.backend.ops import Ops, StepContext, StepRows
from omni_async.models.protocol import StageModel

Rows = Sequence[tuple[int, int]]
"""The rows of one step: a sequence's index and how many of its tokens come next."""


class Forward:
    """The device state of some sequences. Memory that no step has written holds NaN, block 0 zeros."""

    def __init__(
        self,
        model: StageModel,
        ops: Ops,
        sequences: Sequence[Sequence[int]],
        *,
        spare: int = 0,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.model = model
        self.ops = ops
        self.block_size = block_size
        self.lengths = [len(sequence) for sequence in sequences]
        self.computed = [0] * len(sequences)
        longest = max(self.lengths) + spare
        self.tokens = torch.zeros((len(sequences), longest), dtype=torch.int32)
        for slot, sequence in enumerate(sequences):
            self.tokens[slot, : len(sequence)] = torch.tensor(sequence, dtype=torch.int32)
        per_row = -(-longest // block_size)
        num_blocks = len(sequences) * per_row
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(num_blocks)) + 1
        self.block_tables = order.view(len(sequences), per_row).int()
        layout = model.spec.cache
        shape = (num_blocks + 1, block_size, layout.num_kv_heads, layout.head_size)
        self.caches = [
            (torch.full(shape, torch.nan, dtype=dtype), torch.full(shape, torch.nan, dtype=dtype))
            for _ in range(layout.num_layers)
        ]
        for keys, values in self.caches:
            keys[0] = values[0] = 0

    @torch.inference_mode()
    def step(self, rows: Rows) -> list[Tensor]:
        """Run one step; returns the logits `[length, V]` of every row."""
        lengths = [length for _, length in rows]
        step_rows = step_rows_of([(slot, self.computed[slot], length) for slot, length in rows])
        inputs = self.ops.prepare(step_rows, self.tokens, self.block_tables, self.block_size)
        context = StepContext(self.ops, inputs, self.caches, None)
        hidden = self.model.forward(self.model.embed(context), context)
        for slot, length in rows:
            self.computed[slot] += length
        return list(torch.split(self.model.logits(hidden, context), lengths))

    def run(self, steps: Iterable[Rows]) -> list[Tensor]:
        """Run steps until the end; returns the logits `[n, V]` of every sequence's tokens."""
        parts: list[list[Tensor]] = [[] for _ in self.lengths]
        for rows in steps:
            for (slot, _), logits in zip(rows, self.step(rows), strict=True):
                parts[slot].append(logits)
        assert self.computed == self.lengths, "the steps do not cover the sequences"
        return [torch.cat(logits) for logits in parts]

    def extend(self, slot: int, token: int) -> None:
        """Append a token to a sequence."""
        self.tokens[slot, self.lengths[slot]] = token
        self.lengths[slot] += 1


def step_rows_of(rows: Sequence[tuple[int, int, int]]) -> StepRows:
    """Rows of `(slot, start, length)`, all of which draw."""
    slots, starts, lengths = torch.tensor(rows, dtype=torch.int32).unbind(1)
    return StepRows(
        slots=slots,
        starts=starts,
        query_starts=torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int(),
        new_places=torch.full_like(slots, -1),
        new_blocks=torch.zeros_like(slots),
        sampled=torch.arange(len(rows), dtype=torch.int32),
        num_tokens=int(lengths.sum()),
        single=int(lengths.max()) == 1,
    )


def whole(lengths: Sequence[int]) -> list[Rows]:
    """All sequences in one step."""
    return [list(enumerate(lengths))]


def chunked(lengths: Sequence[int], size: int) -> list[Rows]:
    """Steps in which every unfinished sequence advances by `size` tokens, or by what is left of it."""
    return [
        [(slot, min(size, length - start)) for slot, length in enumerate(lengths) if start < length]
        for start in range(0, max(lengths), size)
    ]


def staggered(lengths: Sequence[int], size: int) -> list[Rows]:
    """Steps that mix rows of one token with longer ones: sequence i alternates between `size + i` and 1."""
    left = list(lengths)
    steps: list[Rows] = []
    while any(left):
        turn = len(steps)
        rows = [(slot, min(size + slot if (turn + slot) % 2 else 1, rest)) for slot, rest in enumerate(left) if rest]
        for slot, length in rows:
            left[slot] -= length
        steps.append(rows)
    return steps


def generate(model: StageModel, ops: Ops, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
    """The greedy continuations of some prompts, all in one batch."""
    forward = Forward(model, ops, prompts, spare=num_tokens)
    answers: list[list[int]] = [[] for _ in prompts]
    rows: Rows = list(enumerate(forward.lengths))
    for _ in range(num_tokens):
        for slot, logits in enumerate(forward.step(rows)):
            token = int(logits[-1].argmax())
            answers[slot].append(token)
            forward.extend(slot, token)
        rows = [(slot, 1) for slot in range(len(prompts))]
    return answers
