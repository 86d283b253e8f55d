"""What changes logits before the draw: allowed ids, bias, penalties."""

from dataclasses import replace

import torch
from torch import Tensor

from omni_async.backend.ops import SamplingBatch


def adjust(raw: Tensor, batch: SamplingBatch) -> Tensor:
    """The logits `[S, V] f32` after allowed ids, bias and penalties; `raw` itself if the batch has none."""
    x = raw
    if batch.allowed.shape[1]:
        x = x.masked_fill(~batch.allowed, -torch.inf)
    if batch.has_bias:
        holds = (batch.bias_ids >= 0) & ((batch.lengths - batch.prompt_lens)[:, None] < batch.bias_until)
        x = x.scatter_add(1, batch.bias_ids.clamp(min=0), batch.bias_values.where(holds, 0))
    if batch.has_penalties:
        off = (batch.repetition_penalty == 1) & (batch.presence_penalty == 0) & (batch.frequency_penalty == 0)
        rows = (~off).nonzero()[:, 0]
        if len(rows):
            x = x.index_copy(0, rows, _penalise(x[rows], take(batch, rows)))
    return x


def _penalise(x: Tensor, batch: SamplingBatch) -> Tensor:
    """Repetition penalty on the tokens of prompt and answer, the other two on those of the answer.

    Source: https://arxiv.org/abs/1909.05858 (repetition); the OpenAI API reference (presence and frequency).
    """
    history = batch.tokens[batch.slots, : batch.max_length].long()
    position = torch.arange(batch.max_length, device=x.device)
    known = position < batch.lengths[:, None]
    # Places past a row's end hold anything; they count nothing for token 0.
    history = history.where(known, 0)
    seen = torch.zeros_like(x).scatter_add_(1, history, known.float()) > 0
    answer = (known & (position >= batch.prompt_lens[:, None])).float()
    counts = torch.zeros_like(x).scatter_add_(1, history, answer)
    repetition = batch.repetition_penalty[:, None]
    x = torch.where(seen, torch.where(x > 0, x / repetition, x * repetition), x)
    x = x - batch.presence_penalty[:, None] * (counts > 0)
    return x - batch.frequency_penalty[:, None] * counts


def take(batch: SamplingBatch, rows: Tensor) -> SamplingBatch:
    """The batch of some of the rows, for what comes after bias and allowed ids."""
    return replace(
        batch,
        slots=batch.slots[rows],
        prompt_lens=batch.prompt_lens[rows],
        lengths=batch.lengths[rows],
        temperature=batch.temperature[rows],
        top_k=batch.top_k[rows],
        top_p=batch.top_p[rows],
        min_p=batch.min_p[rows],
        repetition_penalty=batch.repetition_penalty[rows],
        presence_penalty=batch.presence_penalty[rows],
        frequency_penalty=batch.frequency_penalty[rows],
        seed=batch.seed[rows],
        choice=batch.choice[rows],
    )
