import subprocess
import sys

import pytest
import torch

from omni_async import RequestError
from omni_async.backend.ops import SamplingBatch
from omni_async.backend.reference.sampling.adjust import adjust
from omni_async.backend.reference.sampling.rows import SamplingRows, allowed_mask
from omni_async.sampling.params import FOREVER, MAX_BIAS, NO_TOP_K, BiasEntry, SamplingNeeds, check, needs, resolve
from omni_async.types import SamplingParams
from tests.support.sampling import Ask, Defaults, Table, ask, batch_of

VOCAB = 50


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (SamplingParams(logit_bias={50: 1.0}), "logit_bias holds 50.*0 to 49"),
        (SamplingParams(logit_bias={57: 1.0}), "logit_bias holds 57"),
        (SamplingParams(stop_token_ids=[3, 50]), "stop_token_ids holds 50"),
        (SamplingParams(allowed_token_ids=[3, 51]), "allowed_token_ids holds 51"),
        (SamplingParams(logprobs=51), "logprobs is 51.*50 tokens"),
        (SamplingParams(prompt_logprobs=51), "prompt_logprobs is 51"),
    ],
)
def test_what_does_not_fit_the_vocabulary_is_named(params: SamplingParams, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        check(params, VOCAB)


def test_the_limits_themselves_are_legal() -> None:
    check(SamplingParams(logit_bias={49: 100.0}, stop_token_ids=[49], allowed_token_ids=[0, 49], logprobs=50), VOCAB)
    check(SamplingParams(logprobs=-1, prompt_logprobs=-1), VOCAB)


def test_open_fields_take_the_checkpoints_values() -> None:
    defaults = Defaults(temperature=0.6, top_k=20, top_p=0.95, min_p=0.1, repetition_penalty=1.1)
    row = resolve(SamplingParams(), defaults, VOCAB, (), 3, 0, 0)
    assert (row.temperature, row.top_k, row.top_p, row.min_p, row.repetition_penalty) == (0.6, 20, 0.95, 0.1, 1.1)
    given = SamplingParams(temperature=0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0)
    row = resolve(given, defaults, VOCAB, (), 3, 0, 0)
    assert (row.temperature, row.top_k, row.top_p, row.min_p, row.repetition_penalty) == (0, NO_TOP_K, 1, 0, 1)


@pytest.mark.parametrize("top_k", [-1, 0, VOCAB, VOCAB + 1, 9_999_999])
def test_top_k_is_off(top_k: int) -> None:
    row = resolve(SamplingParams(top_k=top_k), Defaults(), VOCAB, (), 3, 0, 0)
    assert row.top_k == NO_TOP_K
    assert needs(row) == SamplingNeeds.RANDOM


@pytest.mark.parametrize(("seed", "kept"), [(0, 0), (-1, -1), (2**64 - 1, -1), (2**63, -(2**63)), (-(2**63), -(2**63))])
def test_a_seed_keeps_its_64_bits(seed: int, kept: int) -> None:
    assert resolve(SamplingParams(), Defaults(), VOCAB, (), 3, seed, 0).seed == kept


def test_end_marks_and_stop_ids_are_forbidden_until_min_tokens() -> None:
    params = SamplingParams(min_tokens=4, stop_token_ids=[7], logit_bias={7: 2.0, 8: 0.0})
    row = resolve(params, Defaults(), VOCAB, (9, 7, VOCAB + 3), 3, 0, 0)
    infinity = float("inf")
    assert row.bias == (BiasEntry(7, 2.0, FOREVER), BiasEntry(7, -infinity, 4), BiasEntry(9, -infinity, 4))
    assert resolve(SamplingParams(stop_token_ids=[7]), Defaults(), VOCAB, (9,), 3, 0, 0).bias == ()


def test_min_tokens_that_forbid_all_that_is_allowed_are_refused() -> None:
    params = SamplingParams(min_tokens=1, allowed_token_ids=[9, 7], stop_token_ids=[7])
    with pytest.raises(RequestError, match="min_tokens is 1"):
        resolve(params, Defaults(), VOCAB, (9,), 3, 0, 0)
    assert resolve(params, Defaults(), VOCAB, (), 3, 0, 0).allowed == (9, 7)


@pytest.mark.parametrize(
    ("params", "wanted"),
    [
        ({"temperature": 0}, SamplingNeeds.NONE),
        ({"temperature": 9e-6, "top_k": 3, "top_p": 0.5, "min_p": 0.5}, SamplingNeeds.NONE),
        ({"temperature": 1e-5}, SamplingNeeds.RANDOM),
        ({"top_k": 3}, SamplingNeeds.RANDOM | SamplingNeeds.FILTERS),
        ({"top_p": 0.9}, SamplingNeeds.RANDOM | SamplingNeeds.FILTERS),
        ({"min_p": 0.1}, SamplingNeeds.RANDOM | SamplingNeeds.FILTERS),
        ({"temperature": 0, "repetition_penalty": 0.9}, SamplingNeeds.PENALTIES),
        ({"temperature": 0, "presence_penalty": -1}, SamplingNeeds.PENALTIES),
        ({"temperature": 0, "frequency_penalty": 1}, SamplingNeeds.PENALTIES),
        ({"temperature": 0, "logit_bias": {1: 1}}, SamplingNeeds.BIAS),
        ({"temperature": 0, "allowed_token_ids": [1]}, SamplingNeeds.ALLOWED),
    ],
)
def test_needs(params: dict[str, object], wanted: SamplingNeeds) -> None:
    assert needs(ask(**params).row(VOCAB)) == wanted


def test_parameters_are_resolved_without_torch() -> None:
    code = "import sys, omni_async.sampling.params; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


# -- the table -----------------------------------------------------------------------------------------------------


def test_the_table_returns_what_was_written() -> None:
    rows = [
        Ask(
            SamplingParams(temperature=0.5, top_k=4, top_p=0.75, min_p=0.25, seed=-5, logprobs=3), [1, 2], [3], choice=2
        ),
        ask([1], temperature=2, repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=-0.5, seed=2**63 + 1),
    ]
    batch = batch_of(rows, VOCAB, num_logprobs=3)
    assert batch.slots.tolist() == [1, 0]
    found = SamplingRows.of(batch)
    assert found.temperature.tolist() == [0.5, 2.0]
    assert found.top_k.tolist() == [4, NO_TOP_K]
    assert (found.top_p.tolist(), found.min_p.tolist()) == ([0.75, 1.0], [0.25, 0.0])
    assert found.repetition_penalty.tolist() == [1.0, 1.5]
    assert (found.presence_penalty.tolist(), found.frequency_penalty.tolist()) == ([0.0, 0.5], [0.0, -0.5])
    assert found.seed.tolist() == [-5, -(2**63) + 1]
    assert (found.choice.tolist(), found.prompt_lens.tolist(), found.lengths.tolist()) == ([2, 0], [2, 1], [3, 1])
    assert batch.needs == SamplingNeeds.PENALTIES | SamplingNeeds.FILTERS | SamplingNeeds.RANDOM
    assert batch.tables.num_bias.tolist() == batch.tables.restricted.tolist() == [0, 0]
    assert batch.tables.num_logprobs[batch.slots].tolist() == [3, -1]


def test_a_reused_slot_keeps_nothing_of_its_last_owner() -> None:
    table = Table(3, VOCAB)
    biased = ask(logit_bias=dict.fromkeys(range(20), 1.0), allowed_token_ids=[3, 4]).row(VOCAB)
    other = ask(logit_bias={5: 2.0}, allowed_token_ids=[6]).row(VOCAB)
    table.write([(1, biased)])
    table.write([(0, other), (1, ask().row(VOCAB))])
    everything = SamplingNeeds.BIAS | SamplingNeeds.ALLOWED
    tokens = torch.zeros((3, 4), dtype=torch.int32)
    batch = SamplingBatch(table.tables, tokens, torch.tensor([1, 0]), torch.tensor([1, 2]), everything, -1)
    assert table.tables.num_bias.tolist() == [1, 0, 0]
    assert table.tables.bias_ids[0, :1].tolist() == [5]
    assert table.tables.bias_until[0, :1].tolist() == [FOREVER]
    allowed = allowed_mask(batch, VOCAB)
    assert allowed[0].all()
    assert allowed[1].nonzero().tolist() == [[6]]
    logits = torch.zeros((2, VOCAB))
    changed = adjust(logits, batch, SamplingRows.of(batch))
    assert torch.equal(changed[0], logits[0])
    assert changed[1, 6] == 0
    assert changed[1].isfinite().sum() == 1


def test_lists_of_bias_have_a_limit() -> None:
    vocab_size = 5000
    table = Table(2, vocab_size)
    most = {i: float(i) for i in range(1, MAX_BIAS + 1)}
    table.write([(0, ask(logit_bias={7: 1.0}).row(vocab_size)), (1, ask(logit_bias=most).row(vocab_size))])
    assert table.tables.num_bias.tolist() == [1, MAX_BIAS]
    assert table.tables.bias_ids[0, :2].tolist() == [7, 0]
    assert table.tables.bias_ids[1].tolist() == table.tables.bias_values[1].tolist() == list(most)
    with pytest.raises(RequestError, match="1025 entries; the limit is 1024"):
        ask(logit_bias=most, min_tokens=1, stop_token_ids=[0]).row(vocab_size)
