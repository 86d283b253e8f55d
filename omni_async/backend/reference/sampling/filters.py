"""Top-k, top-p and min-p as lower bounds: each keeps exactly the tokens whose logit is not below some value.

So tokens of equal probability are kept or dropped together, and the filters join by taking the highest bound. Sums
run along the sorted list, one row at a time in a fixed order, so a row's bound does not depend on other rows.
"""

import torch
from torch import Tensor

NUCLEUS_DEPTH = 256
"""Best tokens among which the border of top-p is looked for before a row is sorted as a whole."""


def lower_bounds(scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """The least logit that each row keeps, `[R] f32`.

    `scaled [R, V] f32` are logits over temperature, the best of each row at 0; the others are `[R]`, as in
    `SamplingRows`.
    """
    bounds = min_p.log()  # at 0, where it is off: -inf
    rows = ((top_k < scaled.shape[1]) | (top_p < 1)).nonzero()[:, 0]
    if len(rows):
        bounds[rows] = torch.maximum(bounds[rows], _ranked_bounds(scaled[rows], top_k[rows], top_p[rows]))
    return bounds


def _ranked_bounds(scaled: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The bounds of top-k, then top-p among what it keeps."""
    vocab_size = scaled.shape[1]
    by_rank = top_k < vocab_size
    depth = int(torch.where(by_rank, top_k, NUCLEUS_DEPTH).max())
    if depth > vocab_size // 16:  # a full sort is as quick
        depth = vocab_size
    bounds, found = _bounds_within(_best(scaled, depth), scaled, top_k, top_p)
    rest = (~found).nonzero()[:, 0]
    if len(rest):
        whole = scaled[rest]
        bounds[rest] = _bounds_within(_best(whole, vocab_size), whole, top_k[rest], top_p[rest])[0]
    return bounds


def _best(scaled: Tensor, depth: int) -> Tensor:
    """The best logits of each row in order, `[R, depth]`."""
    if depth == scaled.shape[1]:
        return scaled.sort(descending=True).values
    return scaled.topk(depth).values


def _bounds_within(best: Tensor, scaled: Tensor, top_k: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """The bounds as far as the best tokens tell, and for which rows they do."""
    depth, vocab_size = best.shape[1], scaled.shape[1]
    by_rank = top_k < vocab_size
    last = top_k.clamp(max=depth)[:, None] - 1
    kth = best.gather(1, last)
    mass = best.exp().cumsum(1, dtype=torch.float64)
    # What top-k keeps: the first k, and others as good as the last of them.
    ties = (scaled >= kth).sum(1, keepdim=True) - (last + 1)
    total = mass.gather(1, last) + ties * kth.exp()
    if depth < vocab_size and not bool(by_rank.all()):
        # A running sum adds in order; a plain one may be split over threads when there is one row.
        sums = scaled.exp().cumsum(1, dtype=torch.float64)[:, -1:]
        total = torch.where(by_rank[:, None], total, sums)
    border = (mass < top_p[:, None] * total).sum(1, keepdim=True)
    found = by_rank | (border[:, 0] < depth) | (depth == vocab_size)
    nucleus = best.gather(1, torch.minimum(border, last))
    bounds = torch.where((top_p < 1)[:, None], nucleus, torch.where(by_rank[:, None], kth, -torch.inf))
    return bounds[:, 0], found
