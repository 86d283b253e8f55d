"""Draws follow the exact distribution, and nothing but a row's own inputs decides them."""

import math
from collections.abc import Sequence

import pytest
import torch

from omni_async.backend.reference.sampling.draw import sample
from omni_async.types import SamplingParams
from tests.support.sampling import Ask, ask, batch_of, draws_of

VOCAB = 24
DRAWS = 200_000


def logits_row(seed: int = 0) -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 1.5


def exact(logits: Sequence[float], params: SamplingParams) -> list[float]:
    """The probabilities by definition, in Python's own floats."""
    x = list(logits)
    if params.allowed_token_ids is not None:
        x = [v if i in params.allowed_token_ids else -math.inf for i, v in enumerate(x)]
    for token, value in params.logit_bias.items():
        x[token] += value
    temperature = 1.0 if params.temperature is None else params.temperature
    best = max(x)
    weights = {i: math.exp((v - best) / temperature) for i, v in enumerate(x)}
    order = sorted(weights, key=lambda i: -weights[i])
    if params.top_k:
        order = order[: params.top_k]
    if params.top_p is not None:
        total, mass, prefix = sum(weights[i] for i in order), 0.0, []
        for i in order:
            prefix.append(i)
            mass += weights[i] / total
            if mass >= params.top_p:
                break
        order = prefix
    if params.min_p is not None:
        order = [i for i in order if weights[i] >= params.min_p]
    total = sum(weights[i] for i in order)
    return [weights[i] / total if i in order else 0.0 for i in range(len(x))]


def chi_square_is_usual(counts: Sequence[int], probabilities: Sequence[float]) -> bool:
    """Whether a chi-square statistic lies below its 99.999 % point (Wilson and Hilferty's approximation)."""
    draws = sum(counts)
    if any(count and not p for count, p in zip(counts, probabilities, strict=True)):
        return False
    # Tokens expected fewer than 10 times are put together.
    common = [(c, p) for c, p in zip(counts, probabilities, strict=True) if p * draws >= 10]
    rare = [(c, p) for c, p in zip(counts, probabilities, strict=True) if 0 < p * draws < 10]
    cells = [*common, (sum(c for c, _ in rare), sum(p for _, p in rare))] if rare else common
    statistic = sum((c - p * draws) ** 2 / (p * draws) for c, p in cells)
    freedom = max(len(cells) - 1, 1)
    spread = 2 / (9 * freedom)
    return statistic < freedom * (1 - spread + 4.265 * math.sqrt(spread)) ** 3


COMBINATIONS = [
    SamplingParams(seed=1),
    SamplingParams(seed=2, temperature=0.5),
    SamplingParams(seed=3, temperature=3.0),
    SamplingParams(seed=4, top_k=5),
    SamplingParams(seed=5, top_p=0.8),
    SamplingParams(seed=6, min_p=0.1),
    SamplingParams(seed=7, temperature=1.7, top_k=12, top_p=0.9, min_p=0.05),
    SamplingParams(seed=8, logit_bias={0: 3.0, 5: -100.0, 23: 2.0}),
    SamplingParams(seed=9, allowed_token_ids=[1, 2, 20], logit_bias={2: 1.0}, temperature=0.8),
    SamplingParams(seed=-10, temperature=0.7, logit_bias={4: 2.0}, top_k=6, top_p=0.95),
]


@pytest.mark.parametrize("params", COMBINATIONS, ids=range(len(COMBINATIONS)))
def test_draws_follow_the_distribution(params: SamplingParams) -> None:
    logits = logits_row()
    drawn = sample(logits.expand(DRAWS, VOCAB), draws_of(params, VOCAB, DRAWS))
    assert drawn.finite.all()
    counts = drawn.token_ids.bincount(minlength=VOCAB).tolist()
    assert chi_square_is_usual(counts, exact(logits.tolist(), params))


def test_the_comparison_notices_a_small_error() -> None:
    logits = logits_row()
    params = SamplingParams(seed=1)
    counts = sample(logits.expand(DRAWS, VOCAB), draws_of(params, VOCAB, DRAWS)).token_ids.bincount(minlength=VOCAB)
    assert not chi_square_is_usual(counts.tolist(), exact(logits.tolist(), SamplingParams(temperature=1.03)))
    assert not chi_square_is_usual(counts.tolist(), exact(logits.tolist(), SamplingParams(top_k=VOCAB - 3)))


def test_successive_draws_are_independent() -> None:
    logits = torch.zeros(DRAWS, 4)
    drawn = sample(logits, draws_of(SamplingParams(seed=1), 4, DRAWS)).token_ids
    pairs = (drawn[:-1] * 4 + drawn[1:]).bincount(minlength=16).tolist()
    assert chi_square_is_usual(pairs, [1 / 16] * 16)


def test_seeds_and_choices_draw_independently() -> None:
    count = 20_000
    logits = torch.zeros(count, 4)
    streams = [
        sample(logits, draws_of(SamplingParams(seed=seed), 4, count)).token_ids for seed in (1, 2, 1 + 2**32, -1)
    ]
    for first in range(len(streams)):
        for second in range(first):
            pairs = (streams[first] * 4 + streams[second]).bincount(minlength=16).tolist()
            assert chi_square_is_usual(pairs, [1 / 16] * 16)
    batch = batch_of([Ask(SamplingParams(seed=1), choice=i) for i in range(200)], 4)
    assert len(sample(torch.zeros(200, 4), batch).token_ids.unique()) == 4


# -- rows and their neighbours -------------------------------------------------------------------------------------

NEIGHBOURS = [
    ask(temperature=0),
    ask(seed=42, temperature=0.8),
    ask(seed=7, top_k=3),
    ask(seed=8, top_k=700, top_p=0.9),
    ask(seed=9, top_p=0.3),
    ask(seed=10, top_p=0.9999),
    ask(seed=11, min_p=0.2, temperature=2.0),
    ask([1, 2], [5, 5, 5], seed=12, repetition_penalty=1.4, frequency_penalty=0.7, presence_penalty=0.2),
    ask([4], [6], temperature=0, frequency_penalty=2.0),
    ask(seed=13, logit_bias={3: 5.0}, stop_token_ids=[9], min_tokens=3),
    ask(seed=14, allowed_token_ids=list(range(100, 200))),
    ask(temperature=0, allowed_token_ids=[2]),
]


@pytest.mark.parametrize("vocab_size", [1000, 6000])
def test_a_row_draws_the_same_in_any_company(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(len(NEIGHBOURS), vocab_size, generator=generator) * 2
    together = sample(logits, batch_of(NEIGHBOURS, vocab_size)).token_ids.tolist()
    for row, each in enumerate(NEIGHBOURS):
        alone = sample(logits[row : row + 1], batch_of([each], vocab_size)).token_ids.tolist()
        assert alone == [together[row]]
    for _ in range(10):
        order = torch.randperm(len(NEIGHBOURS), generator=generator)[:5].tolist()
        some = sample(logits[order], batch_of([NEIGHBOURS[i] for i in order], vocab_size)).token_ids.tolist()
        assert some == [together[i] for i in order]


def test_a_neighbour_without_a_seed_changes_nothing() -> None:
    logits = torch.randn(2, 500, generator=torch.Generator().manual_seed(0))
    drawn = set()
    for neighbour in range(20):
        rows = [ask(seed=42, temperature=0.8), ask(seed=1000 + neighbour)]
        drawn.add(int(sample(logits, batch_of(rows, 500)).token_ids[0]))
        drawn.add(int(sample(logits.flip(0), batch_of(rows[::-1], 500)).token_ids[1]))
    assert len(drawn) == 1


def test_inputs_are_left_alone() -> None:
    logits = torch.randn(len(NEIGHBOURS), 300, generator=torch.Generator().manual_seed(0))
    batch = batch_of([n for n in NEIGHBOURS if n.params.allowed_token_ids is None], 300)
    before, tokens = logits.clone(), batch.tokens.clone()
    sample(logits[: len(batch.slots)], batch)
    assert torch.equal(logits, before)
    assert torch.equal(batch.tokens, tokens)
