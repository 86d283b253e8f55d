"""Attention over the paged cache: one batched call for rows of one token, one call for every longer row.

What to gather for whom is the same in all layers, so it is planned once for a step (`AttentionPlan`).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from omni_async.backend.ops import AttentionBatch, LayerCache
from omni_async.backend.reference.cache import read

MIN_PADDED_CONTEXT = 256
"""Rows of one token share a call if their contexts lie between two powers of two; all below this lie together."""

MAX_MASKED_QUERIES = 512
"""Queries of one call that needs a mask: its mask takes this many times the context."""


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Rows of one token each, attended to together; contexts are padded to `blocks * B` positions."""

    tokens: Tensor | None
    """`[r] int64`: the rows' tokens in the step; `None`: these are all tokens, in order."""
    blocks: Tensor
    """`[r * blocks] int64`: past a row's context the block is 0, which holds zeros."""
    stale: Tensor
    """`int64`: gathered positions past the context in a row's last block, which may hold anything."""
    mask: Tensor
    """`[r, 1, 1, blocks * B]`: 0 or -inf."""


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """Consecutive tokens `first:last` of one row."""

    first: int
    last: int
    blocks: Tensor
    """`int64`: those that hold the context."""
    context: int
    """Keys visible to the last token."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """How the rows of one step are attended to."""

    groups: tuple[DecodeGroup, ...]
    rows: tuple[PrefillRow, ...]
    mask: Tensor
    """`[n, c]`, 0 or -inf: its last m rows and k columns are the causal mask of m queries over k keys."""


def plan_attention(batch: AttentionBatch, block_size: int, dtype: torch.dtype) -> AttentionPlan:
    """Group the rows of a step by kind and size."""
    query_lens = batch.query_starts.diff()
    single = query_lens == 1
    # frexp's exponent is the number of bits of the context's length.
    sizes = torch.frexp(batch.context_lens.clamp(min=MIN_PADDED_CONTEXT).float()).exponent.masked_fill(~single, 0)
    groups = tuple(
        _decode_group(batch, (sizes == size).nonzero().flatten(), block_size, dtype)
        for size in sorted(set(sizes.tolist()))
        if size > 0
    )
    rows = tuple(
        piece for row in (~single).nonzero().flatten().tolist() for piece in _prefill_pieces(batch, row, block_size)
    )
    return AttentionPlan(groups, rows, _causal_mask(rows, dtype, query_lens.device))


def _decode_group(batch: AttentionBatch, rows: Tensor, block_size: int, dtype: torch.dtype) -> DecodeGroup:
    contexts = batch.context_lens[rows]
    max_blocks = -(-int(contexts.max()) // block_size)
    first = torch.arange(max_blocks, device=rows.device) * block_size
    owned = first < contexts[:, None]
    blocks = batch.block_tables[batch.slots[rows], :max_blocks].long().where(owned, 0)
    visible = torch.arange(max_blocks * block_size, device=rows.device) < contexts[:, None]
    stale = owned.repeat_interleave(block_size, dim=1) & ~visible
    mask = torch.zeros(visible.shape, dtype=dtype, device=rows.device).masked_fill_(~visible, float("-inf"))
    return DecodeGroup(
        tokens=None if len(rows) == len(batch.slot_mapping) else batch.query_starts[rows],
        blocks=blocks.flatten(),
        stale=stale.flatten().nonzero().flatten(),
        mask=mask[:, None, None],
    )


def _prefill_pieces(batch: AttentionBatch, row: int, block_size: int) -> list[PrefillRow]:
    first, last = batch.query_starts[row : row + 2].tolist()
    context = int(batch.context_lens[row])
    blocks = batch.block_tables[batch.slots[row], : -(-context // block_size)].long()
    # A row at the start of its context needs no mask of its own, so it is not cut.
    step = MAX_MASKED_QUERIES if context > last - first else last - first
    pieces = []
    for start in range(first, last, step):
        end = min(start + step, last)
        seen = context - (last - end)
        pieces.append(PrefillRow(start, end, blocks[: -(-seen // block_size)], seen))
    return pieces


def _causal_mask(rows: tuple[PrefillRow, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    masked = [row for row in rows if row.context > row.last - row.first]
    queries = max((row.last - row.first for row in masked), default=0)
    keys = max((row.context for row in masked), default=0)
    hidden = torch.ones((queries, keys), dtype=torch.bool, device=device).triu(1 + keys - queries)
    return torch.zeros((queries, keys), dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))


def attend(q: Tensor, cache: LayerCache, plan: AttentionPlan, scale: float) -> Tensor:
    """Attention of `[T, Hq, D]` as planned -> `[T, Hq, D]`."""
    if len(plan.groups) == 1 and plan.groups[0].tokens is None:
        return _attend_group(q, cache, plan.groups[0], scale)
    out = torch.empty_like(q)
    for group in plan.groups:
        out[group.tokens] = _attend_group(q[group.tokens], cache, group, scale)
    for row in plan.rows:
        out[row.first : row.last] = _attend_row(q[row.first : row.last], cache, row, plan.mask, scale)
    return out


def _attend_group(q: Tensor, cache: LayerCache, group: DecodeGroup, scale: float) -> Tensor:
    num_rows, num_heads, head_size = q.shape
    num_kv_heads = cache[0].shape[2]
    keys, values = (
        read(part, group.blocks, q.dtype)
        .view(-1, num_kv_heads, head_size)
        .index_fill_(0, group.stale, 0)
        .view(num_rows, -1, num_kv_heads, head_size)
        .transpose(1, 2)
        for part in cache
    )
    # The query heads that share a key head stand where a call has its queries: no key is repeated.
    grouped = q.reshape(num_rows, num_kv_heads, -1, head_size)
    out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=group.mask, scale=scale)
    return out.reshape(num_rows, num_heads, head_size)


def _attend_row(q: Tensor, cache: LayerCache, row: PrefillRow, mask: Tensor, scale: float) -> Tensor:
    num_queries = row.last - row.first
    keys, values = (
        read(part, row.blocks, q.dtype).flatten(0, 1)[: row.context].transpose(0, 1)[None] for part in cache
    )
    starts_context = row.context == num_queries
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        keys,
        values,
        attn_mask=None if starts_context else mask[-num_queries:, -row.context :],
        is_causal=starts_context,
        scale=scale,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1)
