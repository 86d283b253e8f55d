"""Makes a step's inputs from the device-resident tables."""

import torch
from torch import Tensor

from omni_async.backend.ops import AttentionBatch, StepInputs, StepRows


def prepare(rows: StepRows, tokens: Tensor, block_tables: Tensor, block_size: int) -> StepInputs:
    """See `Ops.prepare`."""
    device = tokens.device
    query_starts = torch.nn.functional.pad(rows.lengths.cumsum(0), (1, 0))
    row_of = torch.repeat_interleave(
        torch.arange(len(rows.slots), device=device), rows.lengths, output_size=rows.num_tokens
    )
    offsets = rows.starts - query_starts[:-1]
    positions = torch.arange(rows.num_tokens, device=device) + offsets[row_of]
    slots = rows.slots[row_of]
    blocks = block_tables[slots, positions // block_size].long()
    return StepInputs(
        token_ids=tokens[slots, positions].long(),
        positions=positions,
        attention=AttentionBatch(
            query_starts=query_starts,
            context_lens=rows.starts + rows.lengths,
            block_tables=block_tables[rows.slots, : -(-rows.max_context // block_size)].long(),
            slot_mapping=blocks * block_size + positions % block_size,
            max_query_len=rows.max_length,
            max_context_len=rows.max_context,
        ),
    )
