"""Makes a step's inputs from the device-resident tables."""

import torch
from torch import Tensor

from omni_async.backend.ops import AttentionBatch, StepInputs, StepRows


def prepare(rows: StepRows, tokens: Tensor, block_tables: Tensor, block_size: int) -> StepInputs:
    """See `Ops.prepare`; padding is for backends whose steps are captured, and is not handled here."""
    row_slots, query_starts, starts = rows.slots.long(), rows.query_starts.long(), rows.starts.long()
    lengths = query_starts.diff()
    gaining = (rows.new_places >= 0).nonzero()[:, 0]
    block_tables[row_slots[gaining], rows.new_places[gaining].long()] = rows.new_blocks[gaining]
    row_of = torch.repeat_interleave(lengths, output_size=rows.num_tokens)
    positions = torch.arange(rows.num_tokens, device=tokens.device) + (starts - query_starts[:-1])[row_of]
    slots = row_slots[row_of]
    blocks = block_tables[slots, positions // block_size].long()
    context_lens = starts + lengths
    sampled = rows.sampled.long()
    return StepInputs(
        token_ids=tokens[slots, positions].long(),
        positions=positions,
        attention=AttentionBatch(
            slots=row_slots,
            query_starts=query_starts,
            context_lens=context_lens,
            block_tables=block_tables,
            slot_mapping=torch.where(blocks > 0, blocks * block_size + positions % block_size, -1),
            single=rows.single,
        ),
        sampled_tokens=query_starts[1:][sampled] - 1,
        sampled_slots=row_slots[sampled],
        sampled_lengths=context_lens[sampled],
    )
