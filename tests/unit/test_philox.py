import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_async.backend.reference.sampling.philox import gumbel, gumbel_at, philox, to_gumbel

M32 = 0xFFFFFFFF


def scalar_philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    a, b, c, d = counter
    k, m = key
    for _ in range(10):
        left, right = divmod(0xD2511F53 * a, 2**32), divmod(0xCD9E8D57 * c, 2**32)
        a, b, c, d = right[0] ^ b ^ k, right[1], left[0] ^ d ^ m, left[1]
        k, m = (k + 0x9E3779B9) % 2**32, (m + 0xBB67AE85) % 2**32
    return a, b, c, d


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((M32, M32, M32, M32), (M32, M32), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]) -> None:
    """The vectors that Random123 publishes for philox4x32-10."""
    c0, c1, c2, c3 = (torch.tensor([word]) for word in counter)
    k0, k1 = (torch.tensor([word]) for word in key)
    assert tuple(int(word) for word in philox((c0, c1, c2, c3), (k0, k1))) == words


word = st.integers(0, M32)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(word, word, word, word, word, word), min_size=1, max_size=20))
def test_equals_the_scalar_form(inputs: list[tuple[int, ...]]) -> None:
    c0, c1, c2, c3, k0, k1 = torch.tensor(inputs).T.contiguous()
    found = torch.stack(philox((c0, c1, c2, c3), (k0, k1)), dim=1).tolist()
    assert [tuple(row) for row in found] == [scalar_philox(i[:4], i[4:]) for i in inputs]  # type: ignore[arg-type]


def expected_gumbel(seed: int, index: int, choice: int, stage: int, codebook: int, token: int) -> float:
    counter = (token // 4, index, choice, stage << 16 | codebook)
    drawn = scalar_philox(counter, (seed & M32, seed >> 32 & M32))[token % 4]
    return -math.log(-math.log(((drawn >> 9) + 0.5) * 2.0**-23))


def test_noise_is_what_the_specification_says() -> None:
    seeds, index, choice = [5, -1, 2**63 - 1, 7 << 40], [0, 9, 31_000, 1], [0, 1, 127, 3]
    columns = torch.tensor(seeds), torch.tensor(index), torch.tensor(choice)
    noise = gumbel(*columns, stage=3, codebook=11, vocab_size=1003)
    assert noise.shape == (4, 1003)
    for row in range(4):
        for token in (0, 1, 2, 3, 4, 250, 999, 1000, 1002):
            wanted = expected_gumbel(seeds[row], index[row], choice[row], 3, 11, token)
            assert noise[row, token].item() == pytest.approx(wanted, abs=2e-6)


def test_candidates_get_the_bits_of_the_whole_vocabulary() -> None:
    seed, index, choice = torch.arange(6) * 2**33, torch.arange(6), torch.tensor([0, 0, 1, 1, 2, 2])
    whole = gumbel(seed, index, choice, 1, 2, 5001)
    ids = torch.randint(5001, (6, 37), generator=torch.Generator().manual_seed(0))
    some = gumbel_at(ids, seed[:, None], index[:, None], choice[:, None], 1, 2)
    assert torch.equal(some, whole.gather(1, ids))
    flat = gumbel_at(ids[4], seed[4], index[4], choice[4], 1, 2)
    assert torch.equal(flat, some[4])


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    seed, index, choice = torch.arange(9), torch.arange(9), torch.zeros(9, dtype=torch.int64)
    for vocab_size in (7, 50_000):
        together = gumbel(seed, index, choice, 0, 0, vocab_size)
        for row in (0, 4, 8):
            one = slice(row, row + 1)
            assert torch.equal(gumbel(seed[one], index[one], choice[one], 0, 0, vocab_size)[0], together[row])


def test_every_input_changes_the_noise() -> None:
    inputs = [(1, 0, 0, 0, 0), (2, 0, 0, 0, 0), (1 + 2**32, 0, 0, 0, 0), (1, 1, 0, 0, 0), (1, 0, 1, 0, 0)]
    inputs += [(1, 0, 0, 1, 0), (1, 0, 0, 0, 1)]
    rows = [
        gumbel(torch.tensor([seed]), torch.tensor([index]), torch.tensor([choice]), stage, codebook, 64)
        for seed, index, choice, stage, codebook in inputs
    ]
    assert len({tuple(row[0].tolist()) for row in rows}) == len(inputs)


def test_extreme_words_give_finite_noise() -> None:
    noise = to_gumbel(torch.tensor([0, 0x1FF, M32, M32 - 0x1FF]))
    assert noise.tolist() == pytest.approx([-math.log(24 * math.log(2))] * 2 + [24 * math.log(2)] * 2, rel=1e-6)


def test_moments() -> None:
    zeros = torch.zeros(20, dtype=torch.int64)
    noise = gumbel(zeros, torch.arange(20), zeros, 0, 0, 50_000).double()
    assert noise.mean().item() == pytest.approx(0.5772156649, abs=5e-3)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=1e-2)
