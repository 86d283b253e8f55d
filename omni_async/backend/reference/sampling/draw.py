"""The sampler in plain torch: the specification of every other one, and what CPU users run.

No row's result depends on another row: what is computed for several rows at once is elementwise, exact, or adds
along the row in a fixed order.
"""

import torch
from torch import Tensor

from omni_async.backend.ops import Logprobs, Sampled, SamplingBatch
from omni_async.backend.reference.sampling.adjust import adjust
from omni_async.backend.reference.sampling.filters import lower_bounds
from omni_async.backend.reference.sampling.philox import gumbel, gumbel_at
from omni_async.backend.reference.sampling.rows import SamplingRows
from omni_async.sampling.params import SamplingNeeds
from omni_async.types import GREEDY_TEMPERATURE


def sample(logits: Tensor, batch: SamplingBatch) -> Sampled:
    """Draw one token for each row of `[S, V]` raw logits of any float type, as `SamplingParams` describes it."""
    raw = logits.float()
    parameters = SamplingRows.of(batch)
    changed = adjust(raw, batch, parameters)
    best = changed.amax(dim=-1)  # NaN if the row holds one
    finite = best.isfinite()
    if changed is not raw:
        finite &= raw.amax(dim=-1).isfinite()
    token_ids = changed.argmax(dim=-1)
    if SamplingNeeds.RANDOM in batch.needs:
        rows = (parameters.temperature >= GREEDY_TEMPERATURE).nonzero()[:, 0]
        if len(rows):
            filtered = SamplingNeeds.FILTERS in batch.needs
            token_ids[rows] = _draw(changed[rows], best[rows], parameters.take(rows), batch.stage, filtered=filtered)
    scores = logprobs(raw, token_ids, batch.num_logprobs) if batch.num_logprobs >= 0 else None
    return Sampled(token_ids, finite, scores)


def logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> Logprobs:
    """Log-softmax of raw logits `[S, V]` at the given ids `[S]` and at the `num_top` best."""
    raw = logits.float()
    scores = raw.log_softmax(dim=-1)
    top_ids = _best_ids(raw, num_top)
    ids = token_ids[:, None]
    return Logprobs(
        chosen=scores.gather(1, ids)[:, 0],
        rank=(raw > raw.gather(1, ids)).sum(dim=-1) + 1,
        top_ids=top_ids,
        top=scores.gather(1, top_ids),
    )


def _best_ids(raw: Tensor, count: int) -> Tensor:
    """The ids of the `count` largest of each row, best first, the lowest id first among equals."""
    if count == 0:
        return torch.empty((len(raw), 0), dtype=torch.int64, device=raw.device)
    if count > raw.shape[1] // 16:
        return raw.argsort(dim=-1, descending=True, stable=True)[:, :count]
    values, ids = raw.topk(count)
    # `topk` orders equals as it likes, and takes any of those that share the last place.
    equals = (values[:, 1:] == values[:, :-1]).any(dim=-1) | ((raw >= values[:, -1:]).sum(dim=-1) > count)
    for row in (equals & values[:, 0].isfinite()).nonzero()[:, 0].tolist():
        candidates = (raw[row] >= values[row, -1]).nonzero()[:, 0]
        order = raw[row, candidates].argsort(descending=True, stable=True)
        ids[row] = candidates[order[:count]]
    return ids


def _draw(x: Tensor, best: Tensor, rows: SamplingRows, stage: int, *, filtered: bool) -> Tensor:
    """One token for each row of `[R, V]`, which it may overwrite, by Gumbel-max among what the filters keep."""
    # The best comes to lie at 0, so that a small temperature never makes an infinity of it.
    scores = x.sub_(best[:, None]).div_(rows.temperature[:, None])
    output_index = rows.lengths - rows.prompt_lens
    vocab_size = scores.shape[1]
    if not filtered:
        return (scores + gumbel(rows.seed, output_index, rows.choice, stage, 0, vocab_size)).argmax(dim=-1)
    kept = scores >= lower_bounds(scores, rows.top_k, rows.top_p, rows.min_p)[:, None]
    scores.masked_fill_(~kept, -torch.inf)
    # Four neighbours share the work of their noise, so it pays to make it for single tokens when they are few.
    is_wide = kept.sum(dim=-1) > vocab_size // 4
    wide = is_wide.nonzero()[:, 0]
    if len(wide):
        scores[wide] += gumbel(rows.seed[wide], output_index[wide], rows.choice[wide], stage, 0, vocab_size)
    narrow, ids = (kept & ~is_wide[:, None]).nonzero(as_tuple=True)
    scores[narrow, ids] += gumbel_at(ids, rows.seed[narrow], output_index[narrow], rows.choice[narrow], stage, 0)
    return scores.argmax(dim=-1)
