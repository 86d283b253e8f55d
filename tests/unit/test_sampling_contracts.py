"""What the parameters promise, one by one."""

import pytest
import torch

from omni_async.backend.reference.sampling.draw import sample
from tests.support.sampling import Ask, ask, batch_of


def drawn(logits: torch.Tensor, *rows: Ask) -> list[int]:
    found = sample(logits, batch_of(rows, logits.shape[1]))
    assert found.finite.all()
    return found.token_ids.tolist()


def random_logits(rows: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 2


@pytest.mark.parametrize("top_k", [255, 256, 257, 9_999_999])
def test_top_k_about_the_size_of_the_vocabulary(top_k: int) -> None:
    logits = random_logits(2, 256)
    for seed in range(20):
        plain = drawn(logits, ask(seed=seed), ask(seed=99))
        limited = drawn(logits, ask(seed=seed, top_k=top_k), ask(seed=99))
        assert limited[1] == plain[1]
        if top_k >= 256:
            assert limited == plain


def test_top_k_of_one_is_greedy() -> None:
    logits = random_logits(20, 3000)
    assert drawn(logits, *[ask(seed=i, top_k=1, temperature=5.0) for i in range(20)]) == logits.argmax(-1).tolist()


def test_a_large_bias_decides() -> None:
    assert drawn(random_logits(1, 256), ask(temperature=0, logit_bias={255: 100.0})) == [255]
    assert drawn(random_logits(1, 256), ask(seed=1, logit_bias={255: 100.0})) == [255]
    logits = torch.tensor([[0.0, 5.0, 4.0]])
    assert drawn(logits, ask(temperature=0, logit_bias={1: -2.0})) == [2]


@pytest.mark.parametrize("temperature", [1e-2, 1e-4, 1e-8, 1e-12, 0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_small_temperatures_are_greedy(temperature: float, dtype: torch.dtype) -> None:
    logits = torch.tensor([[12.0, 11.0, 0.0], [11.0, 12.0, 0.0]], dtype=dtype)
    for seed in range(50):
        assert drawn(logits, ask(seed=seed, temperature=temperature), ask(seed=seed))[0] == 0
    near = torch.tensor([[65_000.0, 65_100.0, -65_000.0]], dtype=torch.float32)
    assert drawn(near, ask(seed=1, temperature=max(temperature, 1e-5), top_p=0.9, min_p=0.1)) == [1]


def test_a_tie_goes_to_the_lowest_id_everywhere() -> None:
    logits = random_logits(8, 300).clamp(max=3)
    logits[:, [7, 3]] = 4.0
    greedy = ask(temperature=0)
    assert drawn(logits[:1], greedy) == [3]
    assert drawn(logits, *[ask(seed=i) for i in range(5)], greedy, ask(seed=9, top_k=2), ask(seed=3))[5] == 3
    assert drawn(logits[:1], ask([1], [2], temperature=0, repetition_penalty=1.1)) == [3]
    assert drawn(logits[:1], ask(temperature=0, logit_bias={9: 0.5})) == [3]
    wide = torch.zeros(2, 70_001)
    assert drawn(wide, greedy, greedy) == [0, 0]


def test_greedy_rows_ignore_filters() -> None:
    logits = random_logits(3, 100)
    rows = [ask(temperature=0, top_k=5, top_p=0.1, min_p=0.9), ask(seed=1, top_k=5), ask(temperature=0)]
    found = drawn(logits, *rows)
    assert [found[0], found[2]] == [int(logits[0].argmax()), int(logits[2].argmax())]


def test_penalties_read_the_token_pool() -> None:
    logits = torch.tensor([[1.0, 0.9, -1.0, 0.5]])

    def greedy(prompt: list[int], answer: list[int], **params: object) -> int:
        return drawn(logits, ask(prompt, answer, temperature=0, **params))[0]

    assert greedy([0], [], repetition_penalty=1.2) == 1  # 1 / 1.2 < 0.9
    assert greedy([0, 1], [], repetition_penalty=2.5) == 3
    assert greedy([0], [], presence_penalty=2, frequency_penalty=2) == 0  # the prompt does not count
    assert greedy([3], [0], presence_penalty=0.2) == 1
    assert greedy([3], [0], frequency_penalty=0.05) == 0
    assert greedy([3], [0, 0, 0], frequency_penalty=0.05) == 1  # counted once for each time
    assert greedy([3], [0, 0, 0], presence_penalty=0.05) == 0  # counted once
    assert greedy([3], [2, 2], frequency_penalty=-1.5) == 2  # -1 + 3
    # A negative logit is multiplied: the penalised token gets worse, not better.
    assert drawn(-logits, ask([2], temperature=0, repetition_penalty=1.5)) == [2]
    negative = torch.tensor([[-1.0, -1.1]])
    assert drawn(negative, ask([0], temperature=0, repetition_penalty=1.2)) == [1]


def test_penalties_do_not_see_past_the_end_of_a_row() -> None:
    """The pool holds the last id past each row's end, which is what a placeholder would look like."""
    logits = torch.tensor([[0.0, 0.9, 1.0], [0.0, 0.9, 1.0]])
    rows = [
        ask([0], temperature=0, repetition_penalty=2.0),
        ask([0], [0, 0, 0, 0], temperature=0, frequency_penalty=1.0),
    ]
    assert drawn(logits, *rows) == [2, 2]


@pytest.mark.parametrize("temperature", [0, 1])
def test_min_tokens_forbid_end_marks_and_stop_ids(temperature: int) -> None:
    logits = torch.full((1, 10), -5.0)
    logits[0, [4, 6]] = 30.0
    for length in range(5):
        row = ask(answer=[1] * length, eos=(4,), temperature=temperature, seed=1, min_tokens=3, stop_token_ids=[6])
        assert (drawn(logits, row)[0] in (4, 6)) == (length >= 3)


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_allowed_ids_alone_are_drawn(temperature: float) -> None:
    logits = random_logits(40, 500)
    rows = [ask(seed=i, temperature=temperature, allowed_token_ids=[499, 17, 30]) for i in range(40)]
    found = drawn(logits, *rows)
    assert set(found) <= {17, 30, 499}
    assert len(set(found)) == 3
    # A bias does not let in what is not allowed; a penalty applies among what is.
    assert drawn(logits[:1], ask(temperature=0, allowed_token_ids=[5], logit_bias={6: 100.0})) == [5]


@pytest.mark.parametrize("params", [{"temperature": 0}, {"seed": 1}, {"seed": 1, "top_k": 3, "top_p": 0.9}])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_broken_rows_are_reported_and_harm_nobody(params: dict[str, object], bad: float) -> None:
    logits = random_logits(3, 1000)
    wanted = drawn(logits, *[ask(**params)] * 3)
    spoilt = logits.clone()
    spoilt[1, 17] = bad
    found = sample(spoilt, batch_of([ask(**params)] * 3, 1000, num_logprobs=3))
    assert found.finite.tolist() == [True, False, True]
    assert [found.token_ids[0], found.token_ids[2]] == [wanted[0], wanted[2]]
    assert 0 <= found.token_ids[1] < 1000


def test_a_broken_logit_is_reported_even_where_it_is_not_allowed() -> None:
    logits = random_logits(1, 100)
    logits[0, 50] = torch.nan
    assert sample(logits, batch_of([ask(allowed_token_ids=[1, 2])], 100)).finite.tolist() == [False]


def test_a_row_without_any_possible_token_is_reported() -> None:
    logits = random_logits(3, 100)
    logits[0] = -torch.inf
    logits[1, 7:] = -torch.inf
    rows = [ask(seed=1), ask(seed=1, allowed_token_ids=[8, 9]), ask(seed=1, top_k=2)]
    found = sample(logits, batch_of(rows, 100))
    assert found.finite.tolist() == [False, False, True]
    assert all(0 <= token < 100 for token in found.token_ids.tolist())


def test_impossible_tokens_are_never_drawn() -> None:
    logits = random_logits(200, 100)
    logits[:, ::2] = -torch.inf
    for params in ({}, {"top_k": 80}, {"top_p": 0.999}, {"temperature": 50.0}):
        found = drawn(logits, *[ask(seed=i, **params) for i in range(200)])
        assert all(token % 2 for token in found)
