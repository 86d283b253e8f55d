"""What changes logits before the draw: allowed ids, bias, penalties."""

import torch
from torch import Tensor

from omni_async.backend.ops import SamplingBatch, SamplingTables
from omni_async.backend.reference.sampling.rows import SamplingRows, allowed_mask
from omni_async.sampling.params import SamplingNeeds


def adjust(raw: Tensor, batch: SamplingBatch, rows: SamplingRows) -> Tensor:
    """The logits `[S, V] f32` after allowed ids, bias and penalties; `raw` itself if the batch has none."""
    x = raw
    if SamplingNeeds.ALLOWED in batch.needs:
        x = x.masked_fill(~allowed_mask(batch, raw.shape[1]), -torch.inf)
    if SamplingNeeds.BIAS in batch.needs:
        x = _add_bias(x, batch.tables, rows)
    if SamplingNeeds.PENALTIES in batch.needs:
        off = (rows.repetition_penalty == 1) & (rows.presence_penalty == 0) & (rows.frequency_penalty == 0)
        penalised = (~off).nonzero()[:, 0]
        if len(penalised):
            x = x.index_copy(0, penalised, _penalise(x[penalised], batch.tokens, rows.take(penalised)))
    return x


def _add_bias(x: Tensor, tables: SamplingTables, rows: SamplingRows) -> Tensor:
    counts = tables.num_bias[rows.slots]
    width = int(counts.max())
    ids = tables.bias_ids[rows.slots, :width].long()
    valid = torch.arange(width, device=x.device) < counts[:, None]
    holds = valid & ((rows.lengths - rows.prompt_lens)[:, None] < tables.bias_until[rows.slots, :width])
    return x.scatter_add(1, ids.where(valid, 0), tables.bias_values[rows.slots, :width].where(holds, 0))


def _penalise(x: Tensor, tokens: Tensor, rows: SamplingRows) -> Tensor:
    """Repetition penalty on the tokens of prompt and answer, the other two on those of the answer.

    Source: https://arxiv.org/abs/1909.05858 (repetition); the OpenAI API reference (presence and frequency).
    """
    longest = int(rows.lengths.max())
    history = tokens[rows.slots, :longest].long()
    position = torch.arange(longest, device=x.device)
    known = position < rows.lengths[:, None]
    # Places past a row's end hold anything; they count nothing for token 0.
    history = history.where(known, 0)
    seen = torch.zeros_like(x).scatter_add_(1, history, known.float()) > 0
    answer = (known & (position >= rows.prompt_lens[:, None])).float()
    counts = torch.zeros_like(x).scatter_add_(1, history, answer)
    repetition = rows.repetition_penalty[:, None]
    x = torch.where(seen, torch.where(x > 0, x / repetition, x * repetition), x)
    x = x - rows.presence_penalty[:, None] * (counts > 0)
    return x - rows.frequency_penalty[:, None] * counts
