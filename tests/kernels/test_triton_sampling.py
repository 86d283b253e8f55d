"""The Triton sampler against the reference: on a CUDA device if there is one, else in Triton's interpreter.

Scratch holds NaN and huge integers before each call. The logits leave no near ties, so ids must be equal.
"""

from collections.abc import Iterator, Sequence
from dataclasses import astuple, replace

import pytest
import torch
from omni_async_kernels import sampling_tiling
from omni_async_kernels.sampling import SamplingTables, logprobs, sample
from torch import Tensor

from omni_async.backend.ops import SamplingBatch
from omni_async.backend.reference.sampling import draw as reference
from omni_async.sampling.params import SamplingNeeds
from tests.support.sampling import Ask, ask, batch_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]
MANY = 5 if DEVICE == "cuda" else 1
"""The interpreter is slow."""

pytestmark = [
    # Triton's interpreter makes the bounds of a loop from arrays of one element, and numpy tells of every infinity.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


@pytest.fixture(autouse=True)
def uninitialised_memory_is_poisoned() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


def tables_of(batch: SamplingBatch) -> SamplingTables:
    """On the device, one-dimensional tables as columns of one matrix."""
    theirs = astuple(batch.tables)
    lines = torch.zeros((len(theirs[0]), 17), dtype=torch.int32, device=DEVICE)
    columns = []
    for i, table in enumerate(theirs[:14]):
        lines[:, i] = table.contiguous().view(torch.int32)
        columns.append(lines.view(table.dtype)[:, i])
    return SamplingTables(*columns, *(table.to(DEVICE) for table in theirs[14:]), stage=batch.stage)


def draw(logits: Tensor, batch: SamplingBatch) -> tuple[Tensor, Tensor]:
    """Our ids and finite rows; each row has a padding row behind it, and lies in a wider matrix."""
    num_rows, vocab_size = logits.shape
    slots = torch.full((2 * num_rows,), -1)
    slots[::2] = batch.slots
    lengths = torch.zeros_like(slots)
    lengths[::2] = batch.lengths
    wide = torch.full((2 * num_rows, vocab_size + 8), torch.nan, dtype=logits.dtype)
    wide[::2, :vocab_size] = logits
    before = wide.clone()
    wide = wide.to(DEVICE)
    ids, finite = sample(
        wide[:, :vocab_size], slots.to(DEVICE), lengths.to(DEVICE), batch.tokens.to(DEVICE), tables_of(batch)
    )
    assert torch.equal(wide.cpu().nan_to_num(7.0), before.nan_to_num(7.0))
    assert ids.dtype is torch.int64
    assert bool((ids[1::2] == 0).all())
    assert bool(finite[1::2].all())
    return ids[::2].cpu(), finite[::2].cpu()


def check(logits: Tensor, rows: Sequence[Ask], stage: int = 0) -> Tensor:
    """Compare with the reference; returns the ids."""
    batch = replace(batch_of(rows, logits.shape[1]), stage=stage)
    ids, finite = draw(logits, batch)
    expected = reference.sample(logits, batch)
    assert finite.tolist() == expected.finite.tolist()
    wrong = {i: (ids[i].item(), expected.token_ids[i].item()) for i in finite.nonzero()[:, 0].tolist()}
    assert not {i: (pair, rows[i].params) for i, pair in wrong.items() if pair[0] != pair[1]}
    return ids


def random_logits(num_rows: int, vocab_size: int, dtype: torch.dtype, seed: int = 0, scale: float = 3.0) -> Tensor:
    return (torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def mixed(vocab_size: int, seed: int) -> list[Ask]:
    """Rows with all features, alone and together."""
    last = vocab_size - 1
    some = sorted({0, last, *range(1, vocab_size, 3)})
    prompt = [i * 7 % vocab_size for i in range(60)]
    answer = [i * i % vocab_size for i in range(45)]
    bias = {0: 3.5, last: -2.25, vocab_size // 2: 5.0}
    seeds = iter([seed + 2**63 - 1 - i if i % 2 else -(2**40) - seed - i for i in range(40)])

    def random(prompt: Sequence[int] = prompt, answer: Sequence[int] = answer, **params: object) -> Ask:
        return ask(prompt, answer, **{"temperature": 1.0, "seed": next(seeds) % 2**63, **params})

    return [
        ask(temperature=0),
        ask(prompt, answer, temperature=0, repetition_penalty=1.3, presence_penalty=0.7, frequency_penalty=-0.4),
        ask(prompt, answer, temperature=0, frequency_penalty=0.3, logit_bias=bias),
        ask(temperature=0, allowed_token_ids=some[1:] or some, logit_bias=bias),
        ask([0], [last], eos=[0] if vocab_size > 1 else [], temperature=0, min_tokens=2 if vocab_size > 1 else 0),
        random(),
        random(temperature=3e-4),
        random(temperature=40.0, allowed_token_ids=some),
        random(repetition_penalty=0.8, logit_bias=bias, presence_penalty=-1.0),
        random(top_k=1),
        random(top_k=5),
        random(top_k=40, top_p=0.9, temperature=0.7),
        random(top_k=min(300, vocab_size), top_p=0.5, min_p=0.01),
        random(top_k=min(700, vocab_size), temperature=2.5),
        random(top_k=min(900, vocab_size), top_p=0.8, temperature=5.0),
        random(top_k=40, frequency_penalty=1.5, repetition_penalty=1.1, logit_bias=bias),
        random(top_p=1e-6),
        random(top_p=0.5, temperature=3.0),
        random(top_p=0.95, repetition_penalty=1.2),
        random(top_p=0.999, temperature=20.0),
        random(min_p=1.0),
        random(min_p=0.05, temperature=2.0),
        random(top_p=0.3, min_p=0.02, temperature=4.0, allowed_token_ids=some),
        random(prompt=[last], answer=[], top_p=0.9),
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab_size", [1, 7, 1000, 4099])
def test_mixed_rows(vocab_size: int, dtype: torch.dtype) -> None:
    for seed in range(MANY):
        rows = mixed(vocab_size, seed)
        check(random_logits(len(rows), vocab_size, dtype, seed), rows, stage=seed + 2)


def test_large_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling_tiling, "ENOUGH_PROGRAMS", 1)
    rows = mixed(4099, 11)
    check(random_logits(len(rows), 4099, torch.float32, 5), rows)


@pytest.mark.parametrize("top_p", [0.01, 0.5, 0.95])
def test_flat_logits_keep_most_of_the_vocabulary(top_p: float) -> None:
    rows = [ask(temperature=1.0, top_p=top_p, seed=seed) for seed in range(6 * MANY)]
    check(random_logits(len(rows), 3000, torch.float32, 2, 0.1), rows)


MANY_EACH = (300, 400, 500, 100)
"""So many tokens are as good as each other; their weights are about 300, 396, 490 and 61."""
SOME_EACH = (90, 130, 160, 40)
FEW_EACH = (20, 30, 40, 10)
"""Weights: 20, 30, 39 and 6."""


@pytest.mark.parametrize(
    ("sizes", "params", "num_kept"),
    [
        (FEW_EACH, {"top_k": 20}, 20),
        (FEW_EACH, {"top_k": 21}, 50),
        (FEW_EACH, {"top_k": 50}, 50),
        (FEW_EACH, {"top_k": 51}, 90),
        (FEW_EACH, {"top_k": 30, "top_p": 0.9}, 50),
        (FEW_EACH, {"top_k": 30, "top_p": 0.38}, 20),
        (FEW_EACH, {"top_k": 30, "min_p": 0.995}, 20),
        (SOME_EACH, {"top_k": 120, "top_p": 0.9}, 220),
        (MANY_EACH, {"top_k": 700}, 700),
        (MANY_EACH, {"top_k": 701}, 1200),
        (MANY_EACH, {"top_k": 600, "top_p": 0.9}, 700),
        (MANY_EACH, {"top_k": 600, "top_p": 0.42}, 300),
        (MANY_EACH, {"top_k": 600, "top_p": 0.99, "min_p": 0.995}, 300),
        (MANY_EACH, {"top_k": 400, "top_p": 0.9}, 700),
        (MANY_EACH, {"top_k": 400, "min_p": 0.995}, 300),
        (MANY_EACH, {"top_p": 0.23}, 300),
        (MANY_EACH, {"top_p": 0.26}, 700),
        (MANY_EACH, {"top_p": 0.54}, 700),
        (MANY_EACH, {"top_p": 0.58}, 1200),
        (MANY_EACH, {"min_p": 0.995}, 300),
        (MANY_EACH, {"min_p": 0.985}, 700),
        (MANY_EACH, {"min_p": 0.985, "top_p": 0.7}, 700),
    ],
    ids=str,
)
def test_borders_between_levels(sizes: tuple[int, ...], params: dict[str, float], num_kept: int) -> None:
    """Neighbouring levels have much weight, so a border in the wrong place shows."""
    values = torch.cat([torch.full((size,), level) for size, level in zip(sizes, (2, 1.99, 1.98, 1.5), strict=True)])
    place = torch.randperm(len(values), generator=torch.Generator().manual_seed(1))
    rows = [ask(temperature=1.0, seed=seed, **params) for seed in range(2 if sizes == SOME_EACH else 8)]
    logits = torch.empty(len(rows), len(values))
    logits[:, place] = values
    drawn = check(logits, rows)
    assert bool((place.argsort()[drawn] < num_kept).all())


@pytest.mark.parametrize("params", [{}, {"top_k": 5}], ids=str)
def test_few_tokens_are_kept(params: dict[str, float]) -> None:
    """Of four tokens with probabilities 0.4, 0.3, 0.2 and 0.1, top-p, top-k and min-p keep the first one to four."""
    logits = (-20 - torch.arange(200) * 0.1).repeat(30, 1)
    logits[:, [150, 9, 70, 33]] = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    filters: list[dict[str, float]] = [
        *({"top_p": top_p, **params} for top_p in (0.35, 0.45, 0.75, 0.95)),
        *({"top_k": top_k} for top_k in (1, 2, 3)),
        *({"min_p": min_p, **params} for min_p in (0.8, 0.6, 0.3)),
    ]
    rows = [ask(temperature=1.0, seed=seed, **each) for each in filters for seed in range(3)]
    ids = check(logits, rows)
    kept = [size for size in (1, 2, 3, 4, 1, 2, 3, 1, 2, 3) for _ in range(3)]
    order = {150: 1, 9: 2, 70: 3, 33: 4}
    drawn = [order[token] for token in ids.tolist()]
    assert all(rank <= most for rank, most in zip(drawn, kept, strict=True))


def test_small_top_k() -> None:
    rows = [ask(temperature=1.0, seed=seed, top_k=2) for seed in range(12)]
    check(random_logits(len(rows), 200, torch.float32, 8, 0.1), rows)


def test_the_lowest_of_equal_ids_is_taken() -> None:
    logits = torch.zeros(4, 2500)
    logits[1:, [70, 71, 1200, 2400]] = 1
    logits[2, 70] = 0
    rows = [ask(temperature=0), ask(temperature=0), ask(temperature=0), ask([70], [71], temperature=0)]
    rows.append(ask([70], [71], temperature=0, presence_penalty=0.5, repetition_penalty=2.0))
    logits = torch.cat([logits, logits[3:]])
    assert check(logits, rows).tolist() == [0, 70, 71, 70, 1200]


def test_forbidden_tokens() -> None:
    """Most logits are -inf: fewer than top-k are left, whole tiles are empty."""
    logits = torch.full((6, 3000), -torch.inf)
    logits[:, [17, 1300, 2999]] = torch.tensor([1.0, 1.5, 0.5])
    rows = [
        ask(temperature=0),
        ask(temperature=1.0, seed=1),
        ask(temperature=1.0, seed=2, top_k=50, top_p=0.99),
        ask(temperature=1.0, seed=3, top_p=0.9),
        ask(temperature=1.0, seed=4, top_k=600, top_p=0.99),
        ask([17], [17], temperature=0.5, seed=5, min_p=0.1, frequency_penalty=1.0),
    ]
    check(logits, rows)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ties(dtype: torch.dtype) -> None:
    """Thousands of equals: the lowest id first, and those at a border stay together."""
    logits = random_logits(10, 4099, dtype, 3, 1.0).round()
    rows = [
        ask(temperature=0),
        ask([0], list(range(300)), temperature=0, presence_penalty=1.0),
        *(ask(temperature=1.0, seed=seed, top_k=3) for seed in range(2)),
        ask(temperature=1.0, seed=3, top_k=200, top_p=0.6),
        ask(temperature=1.0, seed=7, top_k=400),
        ask(temperature=1.0, seed=8, top_k=400, top_p=0.7),
        ask(temperature=1.0, seed=4, top_p=0.02),
        ask(temperature=1.0, seed=5, top_k=600, top_p=0.4),
        ask(temperature=1.0, seed=6, min_p=0.13),
    ]
    check(logits, rows)


def test_a_long_history() -> None:
    """Of several blocks, with tokens that occur hundreds of times, also on both sides of the prompt's end."""
    prompt, answer = [5, 6, 7] * 700, [5, 8] * 900 + [400]
    rows = [
        ask(prompt, answer, temperature=0, frequency_penalty=0.01, presence_penalty=0.5),
        ask(prompt, answer, temperature=1.0, seed=1, top_k=10, repetition_penalty=1.5, frequency_penalty=-0.01),
        ask(prompt, [], temperature=1.0, seed=2, repetition_penalty=0.5),
    ]
    logits = random_logits(3, 500, torch.float32, 4)
    logits[:, 5:9] += 9
    check(logits, rows)


def test_biases_of_one_token_add_up_while_they_hold() -> None:
    rows = [
        ask(answer=[3, 4], temperature=0, logit_bias=dict.fromkeys(range(300), 1.0)),
        ask(answer=[3, 4], temperature=1.0, seed=5, top_k=4),
    ]
    batch = batch_of(rows, 400)
    logits = random_logits(2, 400, torch.float32, 7, 0.1)
    for slot in batch.slots.tolist():
        batch.tables.num_bias[slot] = 305
        batch.tables.bias_ids[slot, 300:305] = torch.tensor([350, 0, 350, 7, 350])
        batch.tables.bias_until[slot, :305] = 3
        batch.tables.bias_until[slot, 303] = 2  # two tokens have been drawn
        batch.tables.bias_values[slot, 300:305] = torch.tensor([0.75, -9.0, 0.7, 50.0, 0.1])
    batch = replace(batch, needs=batch.needs | SamplingNeeds.BIAS)
    ids, finite = draw(logits, batch)
    assert finite.all()
    assert ids.tolist() == reference.sample(logits, batch).token_ids.tolist()
    assert ids[0] == 350


def test_rows_that_are_not_finite() -> None:
    logits = random_logits(9, 1500, torch.float32)
    logits[0, 1499] = torch.nan
    logits[1, 3] = torch.inf
    logits[2] = -torch.inf
    logits[3] = torch.nan
    logits[4, 5] = -torch.inf
    logits[5, 700] = torch.nan
    logits[6, ::2] = torch.nan
    logits[7, 700] = torch.inf
    logits[8, [4, 9]] = -torch.inf
    rows = [
        ask(temperature=0),
        ask(temperature=1.0, top_p=0.5),
        ask(temperature=1.0, top_k=5),
        ask(temperature=1.0, top_k=700, top_p=0.5, repetition_penalty=1.5),
        ask(temperature=0),
        ask(temperature=0, allowed_token_ids=[1]),
        ask(temperature=1.0, top_k=20),
        ask([0], [700], temperature=1.0, logit_bias={700: -1e4}),
        ask(temperature=1.0, top_k=5, allowed_token_ids=[4, 9]),
    ]
    ids = check(logits, rows)
    assert ids.tolist() == [logits[4].argmax() if i == 4 else 0 for i in range(9)]


def test_draws_differ_by_stage_choice_and_index() -> None:
    logits = torch.zeros(6, 700)
    rows = [
        ask(temperature=1.0, seed=2**40),
        ask(temperature=1.0, seed=0),
        ask(answer=[1], temperature=1.0, seed=0),
        replace(ask(temperature=1.0, seed=0), choice=1),
        ask(temperature=1.0, seed=2**63),
        ask(temperature=1.0, seed=2**31),
    ]
    drawn = [check(logits, rows, stage).tolist() for stage in range(2)]
    assert len({*drawn[0], *drawn[1]}) == 12


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("vocab_size", "max_top"), [(1, 1), (7, 3), (1000, 0), (1000, 20), (4099, 20), (600, 530)])
def test_logprobs(vocab_size: int, max_top: int, dtype: torch.dtype) -> None:
    wanted = [0, min(5, max_top), max_top, -1, max_top]
    logits = random_logits(5, vocab_size, dtype, 1)
    logits[2] = logits[2].mul(2).round()
    if max_top < 500:
        logits[4] = logits[4].mul(0.2).round()
    batch = batch_of([ask(logprobs=None if n < 0 else n) for n in wanted], vocab_size)
    given = torch.tensor([0, vocab_size - 1, vocab_size // 2, 0, vocab_size // 3])
    slots = batch.slots.clone()
    chosen, rank, top_ids, top = (
        part.cpu()
        for part in logprobs(logits.to(DEVICE), given.to(DEVICE), slots.to(DEVICE), tables_of(batch), max_top)
    )
    expected = reference.logprobs(logits, given, max_top)
    assert top_ids.shape == top.shape == (5, max_top)
    for row, count in enumerate(wanted):
        if count >= 0:
            assert chosen[row].item() == pytest.approx(expected.chosen[row].item(), abs=1e-5)
            assert rank[row] == expected.rank[row]
            assert top_ids[row, :count].tolist() == expected.top_ids[row, :count].tolist()
            assert top[row, :count].tolist() == pytest.approx(expected.top[row, :count].tolist(), abs=1e-5)


def test_logprobs_of_what_is_not_finite_end() -> None:
    logits = random_logits(3, 1100, torch.float32)
    logits[0, ::3] = torch.nan
    logits[1] = torch.nan
    logits[2, 4:] = -torch.inf
    batch = batch_of([ask(logprobs=5)] * 3, 1100)
    zeros = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    chosen, rank, top_ids, _ = logprobs(logits.to(DEVICE), zeros, batch.slots.to(DEVICE), tables_of(batch), 5)
    expected = reference.logprobs(logits, zeros.cpu(), 5)
    assert chosen[2].item() == pytest.approx(expected.chosen[2].item(), abs=1e-5)
    assert rank[2] == expected.rank[2]
    assert top_ids[2].tolist() == [*expected.top_ids[2, :4].tolist(), 4]


def test_no_rows() -> None:
    batch = batch_of([ask()], 50)
    none = torch.empty(0, dtype=torch.int64, device=DEVICE)
    logits = torch.empty((0, 50), device=DEVICE)
    ids, finite = sample(logits, none, none, batch.tokens.to(DEVICE), tables_of(batch))
    assert len(ids) == len(finite) == 0
    assert logprobs(logits, none, none, tables_of(batch), 3)[2].shape == (0, 3)
