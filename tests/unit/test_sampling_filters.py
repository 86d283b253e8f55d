import math

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from omni_async.backend.reference.sampling.adjust import adjust
from omni_async.backend.reference.sampling.filters import lower_bounds
from omni_async.backend.reference.sampling.rows import SamplingRows
from omni_async.sampling.params import NO_TOP_K
from tests.support.sampling import ask, batch_of

Filters = tuple[float, int, float, float]
"""Temperature, top-k (0: off), top-p, min-p."""

FILTERS: list[Filters] = [
    (1.0, 0, 1.0, 0.0),
    (0.7, 1, 1.0, 0.0),
    (1.3, 40, 1.0, 0.0),
    (0.8, 0, 0.9, 0.0),
    (1.0, 0, 0.05, 0.0),
    (1.0, 0, 0.999, 0.0),
    (2.0, 0, 1.0, 0.03),
    (1.0, 0, 1.0, 1.0),
    (0.6, 20, 0.95, 0.0),
    (1.5, 300, 0.9, 0.02),
    (1.1, 5000, 0.7, 0.0),
    (3.0, 0, 0.99, 0.1),
]


def kept(logits: Tensor, filters: list[Filters]) -> Tensor:
    temperature, top_k, top_p, min_p = (torch.tensor(column) for column in zip(*filters, strict=True))
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperature[:, None]
    top_k = torch.where(top_k == 0, NO_TOP_K, top_k)
    return scaled >= lower_bounds(scaled, top_k, top_p, min_p)[:, None]


def kept_by_transformers(logits: Tensor, filters: Filters) -> Tensor:
    temperature, top_k, top_p, min_p = filters
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    if min_p > 0:
        warpers.append(MinPLogitsWarper(min_p))
    ids = torch.zeros((len(logits), 1), dtype=torch.int64)
    return warpers(ids, logits).isfinite()


def random_logits(rows: int, vocab_size: int, seed: int, scale: float = 3.0) -> Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.parametrize(("vocab_size", "scale"), [(50, 1.0), (500, 3.0), (6000, 3.0), (6000, 0.2)])
def test_the_kept_sets_are_those_of_transformers(vocab_size: int, scale: float) -> None:
    filters = [f for f in FILTERS if f[1] <= vocab_size]
    for seed in range(3):
        logits = random_logits(len(filters), vocab_size, seed, scale)
        together = kept(logits, filters)
        for row, each in enumerate(filters):
            one = logits[row : row + 1]
            assert torch.equal(together[row], kept_by_transformers(one, each)[0]), each
            # Neighbours with other depths of sorting change nothing.
            assert torch.equal(together[row], kept(one, [each])[0]), each


def test_repetition_penalty_is_that_of_transformers() -> None:
    logits = random_logits(3, 40, 5)
    rows = [
        ask([1, 2, 3], [3, 4], repetition_penalty=1.7),
        ask([5], repetition_penalty=0.6),
        ask([0, 0, 0], [39, 38, 38, 37], repetition_penalty=1.2),
    ]
    batch = batch_of(rows, 40)
    found = adjust(logits, batch, SamplingRows.of(batch))
    for row, each in enumerate(rows):
        assert each.params.repetition_penalty is not None
        ids = torch.tensor([[*each.prompt, *each.answer]])
        wanted = RepetitionPenaltyLogitsProcessor(each.params.repetition_penalty)(ids, logits[row : row + 1].clone())
        assert torch.equal(found[row], wanted[0])


def border_logits() -> Tensor:
    """500 tokens in falling order; the first 60 have mass 0.8999, the 61st lifts it to 0.9011."""
    head = torch.linspace(2, 1, 60, dtype=torch.float64)
    tail = torch.linspace(1, 0.5, 439, dtype=torch.float64)
    probabilities = torch.cat(
        [head / head.sum() * 0.8999, torch.tensor([0.0012], dtype=torch.float64), tail / tail.sum() * 0.0989]
    )
    assert bool((probabilities[1:] <= probabilities[:-1]).all())
    return probabilities.log().float()[None]


@pytest.mark.parametrize("order", ["falling", "shuffled"])
def test_the_token_that_crosses_the_border_is_kept(order: str) -> None:
    logits = border_logits()
    places = (
        torch.randperm(500, generator=torch.Generator().manual_seed(1)) if order == "shuffled" else torch.arange(500)
    )
    found = kept(logits[:, places], [(1.0, 0, 0.9, 0.0)])[0]
    assert found.sum() == 61
    assert bool(found[(places == 60).nonzero()[0]])
    probabilities = logits[0, places].double().softmax(-1)
    assert probabilities[found].sum() >= 0.9 - 1e-6
    assert (probabilities[found] / probabilities[found].sum()).sum().item() == pytest.approx(1, abs=1e-5)


def test_ties_at_a_border_stay_together() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0, 2.0, -1.0]]).expand(4, 8)
    found = kept(logits, [(1.0, 2, 1.0, 0.0), (1.0, 0, 0.5, 0.0), (1.0, 3, 0.9, 0.0), (1.0, 0, 1.0, math.exp(-1))])
    for row in range(4):
        assert found[row].nonzero()[:, 0].tolist() == [1, 2, 3, 4, 6]


def test_ties_beyond_the_sorted_part_count_for_top_p() -> None:
    """Top-k keeps 6000 equals; half of their mass needs all of them, and a better token outweighs them."""
    level = torch.zeros(1, 6000)
    assert kept(level, [(1.0, 5, 0.5, 0.0)]).all()
    better = level.clone()
    better[0, 17] = math.log(4000.0)
    assert kept(better, [(1.0, 5, 0.39, 0.0)]).nonzero().tolist() == [[0, 17]]
    assert kept(better, [(1.0, 5, 0.41, 0.0)]).all()


def test_top_p_of_one_keeps_all_that_is_possible() -> None:
    logits = random_logits(1, 500, 3)
    logits[0, 7] = -torch.inf
    batch = [(1.0, 0, 1.0, 0.0)]
    assert torch.equal(kept(logits, batch)[0] & logits[0].isfinite(), logits[0].isfinite())
    assert kept(logits, [(1.0, 0, 1e-30, 0.0)]).sum() == 1


def test_more_top_k_than_possible_tokens() -> None:
    logits = torch.full((1, 6000), -torch.inf)
    logits[0, [5, 9]] = torch.tensor([1.0, 1.5])
    found = kept(logits, [(1.0, 50, 0.99, 0.0)])
    assert found.nonzero()[:, 1].tolist() == [5, 9]
