import pytest
import torch

from omni_async.backend.reference.sampling.draw import logprobs, sample
from tests.support.sampling import ask, batch_of

VOCAB = 256


def random_logits(rows: int, vocab_size: int = VOCAB, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def by_definition(row: list[float], count: int) -> list[int]:
    return sorted(range(len(row)), key=lambda i: (-row[i], i))[:count]


@pytest.mark.parametrize("count", [0, 1, 5, 17, VOCAB])
def test_values_ranks_and_the_best(count: int) -> None:
    logits = random_logits(4)
    ids = torch.tensor([3, 200, 0, 255])
    found = logprobs(logits, ids, count)
    exact = logits.double().log_softmax(-1)
    assert torch.allclose(found.chosen.double(), exact[torch.arange(4), ids], atol=1e-5)
    assert found.rank.tolist() == [1 + int((row > row[i]).sum()) for row, i in zip(logits, ids, strict=True)]
    assert found.top_ids.tolist() == [by_definition(row, count) for row in logits.tolist()]
    assert torch.allclose(found.top.double(), exact.gather(1, found.top_ids), atol=1e-5)
    assert found.top_ids.shape == found.top.shape == (4, count)
    if count == VOCAB:
        assert found.top.exp().sum(-1).tolist() == pytest.approx([1.0] * 4, abs=1e-4)


@pytest.mark.parametrize("count", [1, 4, 10, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_come_by_id(count: int, dtype: torch.dtype) -> None:
    logits = random_logits(6, 2000).mul(2).round().div(2).to(dtype)
    found = logprobs(logits, torch.zeros(6, dtype=torch.int64), count)
    assert found.top_ids.tolist() == [by_definition(row, count) for row in logits.float().tolist()]


def test_the_rank_counts_strictly_larger_logits() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0, 3.0]]).expand(5, 5)
    assert logprobs(logits, torch.arange(5), 2).rank.tolist() == [4, 1, 1, 5, 1]


def test_sampling_reports_the_raw_logits() -> None:
    logits = random_logits(2)
    rows = [
        ask(temperature=1.5, top_k=1, seed=3, logit_bias={9: 50.0}),
        ask(answer=[4, 4], temperature=0, allowed_token_ids=[7, 8], repetition_penalty=2.0, frequency_penalty=1.0),
    ]
    drawn = sample(logits, batch_of(rows, VOCAB, num_logprobs=5))
    assert drawn.logprobs is not None
    assert drawn.token_ids[0] == 9
    assert drawn.token_ids[1] in (7, 8)
    wanted = logprobs(logits, drawn.token_ids, 5)
    assert torch.equal(drawn.logprobs.chosen, wanted.chosen)
    assert torch.equal(drawn.logprobs.top_ids, wanted.top_ids)
    assert wanted.chosen.isfinite().all()


def test_nothing_is_computed_unless_asked_for() -> None:
    assert sample(random_logits(1), batch_of([ask()], VOCAB)).logprobs is None
    asked = sample(random_logits(1), batch_of([ask()], VOCAB, num_logprobs=0)).logprobs
    assert asked is not None
    assert asked.top_ids.shape == (1, 0)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    logits = random_logits(5, 50_000)
    ids = torch.arange(5)
    together = logprobs(logits, ids, 8)
    for row in range(5):
        alone = logprobs(logits[row : row + 1], ids[row : row + 1], 8)
        assert torch.equal(alone.chosen[0], together.chosen[row])
        assert torch.equal(alone.top[0], together.top[row])


def test_rows_that_are_not_finite_do_no_harm() -> None:
    logits = random_logits(4, 2000)
    wanted = logprobs(logits, torch.zeros(4, dtype=torch.int64), 6)
    spoilt = logits.clone()
    spoilt[1, 5:9] = torch.nan
    spoilt[2] = -torch.inf
    spoilt[3, 7:9] = torch.inf
    found = logprobs(spoilt, torch.zeros(4, dtype=torch.int64), 6)
    assert torch.equal(found.top_ids[0], wanted.top_ids[0])
    assert torch.equal(found.chosen[0], wanted.chosen[0])
