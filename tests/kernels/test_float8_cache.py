"""Keys and values kept in float8_e4m3fn: how they are written, by the reference and by the kernel, and read.

Triton's interpreter casts to float8 only what float8 can hold; what is rounded is for the device.
"""

from collections.abc import Iterator

import omni_async_kernels as kernels
import pytest
import torch
from torch import Tensor

from omni_async.backend.ops import AttentionBatch, HeadNorm, LayerCache, Rotary
from omni_async.backend.reference.attention import attend, plan_attention
from omni_async.backend.reference.cache import write
from omni_async.backend.reference.rotary import rotate, rotate_and_cache

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]
FP8 = torch.float8_e4m3fn
NUM_HEADS, NUM_KV_HEADS = 3, 2
SLOTS = [4, 19, 5, -1, 10, 11, 16]

# Triton's interpreter makes the bounds of a loop from arrays of one element.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=[str(dtype).removeprefix("torch.") for dtype in DTYPES])
on_the_device = pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter rounds to float8 wrongly")


@pytest.fixture(autouse=True)
def uninitialised_memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def nan_cache(head_size: int) -> LayerCache:
    keys, values = (torch.full((5, 4, NUM_KV_HEADS, head_size), 0x7F, dtype=torch.uint8) for _ in range(2))
    return keys.to(DEVICE).view(FP8), values.to(DEVICE).view(FP8)


def quarter_turns(rotary_dim: int) -> Rotary:
    """Pairs are turned by 0, 90, 180 or 270 degrees, which rounds nothing."""
    turns = torch.arange(8)[:, None] + torch.arange(rotary_dim // 2)
    cos, sin = torch.tensor([1.0, 0, -1, 0])[turns % 4], torch.tensor([0.0, 1, 0, -1])[turns % 4]
    return Rotary(cos.to(DEVICE), sin.to(DEVICE), rotary_dim)


def write_by_kernel(qkv: Tensor, at: Tensor, rotary: Rotary, norm: HeadNorm | None, cache: LayerCache) -> Tensor:
    weights = (None, None, 0.0) if norm is None else (norm.query, norm.key, norm.eps)
    slots = torch.tensor(SLOTS, device=DEVICE)
    return kernels.rotate_and_cache(qkv, at, rotary.cos, rotary.sin, *weights, *cache, slots, NUM_HEADS)


def write_by_reference(qkv: Tensor, at: Tensor, rotary: Rotary, norm: HeadNorm | None, cache: LayerCache) -> Tensor:
    return rotate_and_cache(qkv, at, rotary, norm, cache, torch.tensor(SLOTS, device=DEVICE), NUM_HEADS)


WRITERS = {"reference": write_by_reference, "kernel": write_by_kernel}


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize(("head_size", "rotary_dim"), [(16, 16), (24, 24), (24, 8)])
@every_dtype
def test_what_float8_can_hold_is_kept_and_the_rest_saturates(
    writer: str, head_size: int, rotary_dim: int, dtype: torch.dtype
) -> None:
    exponents, mantissas = (random(7, 7 * head_size, seed=seed) for seed in (1, 2))
    qkv = (8 + (mantissas * 4).round().clamp(0, 7)) * 2.0 ** (exponents * 2).round().clamp(-6, 5)
    qkv *= random(7, 7 * head_size, seed=3).sign()
    outside = random(7, 7 * head_size, seed=4) > 1
    qkv = qkv.where(~outside, qkv.sign() * 449 * 2.0 ** (exponents * 2).round().clamp(0, 6))
    qkv[0, ::5] *= torch.inf
    qkv = qkv.to(dtype)
    at, rotary = torch.tensor([0, 1, 2, 7, 3, 3, 6], device=DEVICE), quarter_turns(rotary_dim)
    if rotary_dim == head_size:
        qkv = qkv.nan_to_num(posinf=6e4, neginf=-6e4)  # the sum of a turned pair would be inf - inf
    else:
        qkv.view(7, -1, head_size)[..., :rotary_dim].clamp_(-6e4, 6e4)
    cache = nan_cache(head_size)
    q = WRITERS[writer](qkv, at, rotary, None, cache)

    heads = qkv.view(7, -1, head_size)
    turned = rotate(heads[:, :-NUM_KV_HEADS], at, rotary)
    assert torch.equal(q, turned[:, :NUM_HEADS])  # queries keep the run dtype
    written = torch.tensor([slot for slot in SLOTS if slot >= 0], device=DEVICE)
    tokens = torch.tensor([token for token, slot in enumerate(SLOTS) if slot >= 0], device=DEVICE)
    for part, exact in zip(cache, (turned[:, NUM_HEADS:], heads[:, -NUM_KV_HEADS:]), strict=True):
        stored = part.float().flatten(0, 1)
        assert torch.equal(stored[written], exact[tokens].float().clamp(-448, 448))
        assert (stored[written].abs() == 448).any()
        others = [slot for slot in range(20) if slot not in SLOTS]
        assert stored[others].isnan().all()


@on_the_device
@pytest.mark.parametrize("normed", [False, True])
@every_dtype
def test_the_kernel_rounds_as_the_reference(normed: bool, dtype: torch.dtype) -> None:
    head_size = 64
    qkv = (random(7, 7 * head_size) * torch.logspace(-4, 2, 7, device=DEVICE)[:, None]).to(dtype)
    qkv[1, 3 * head_size] = qkv[2, -1] = torch.nan
    angles = random(50, head_size // 2)
    rotary = Rotary(angles.cos(), angles.sin(), head_size)
    weights = [(random(head_size, seed=seed) + 1).to(dtype) for seed in (1, 2)]
    norm = HeadNorm(weights[0], weights[1], 1e-6) if normed else None
    at = torch.tensor([0, 1, 2, 49, 7, 7, 30], device=DEVICE)
    ours, theirs = nan_cache(head_size), nan_cache(head_size)
    write_by_kernel(qkv, at, rotary, norm, ours)
    write_by_reference(qkv, at, rotary, norm, theirs)
    assert same(ours[1], theirs[1])
    # A key may differ by the last bit of its run dtype, and then by one step of float8.
    keys, expected = ours[0].float(), theirs[0].float()
    torch.testing.assert_close(keys, expected, rtol=0.126, atol=2**-9, equal_nan=True)
    assert (keys.nan_to_num(500) == expected.nan_to_num(500)).float().mean() > 0.99
    assert ours[0].float().flatten(0, 1)[SLOTS[1]].isnan().any()
    assert ours[1].float().flatten(0, 1)[SLOTS[2]].isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_reference_rounds_to_the_nearest_even_and_keeps_nan(dtype: torch.dtype) -> None:
    cases = {
        0.0: 0.0, 448.0: 448.0, 464.0: 448.0, 466.0: 448.0, -480.0: -448.0, 6e4: 448.0, torch.inf: 448.0,
        -torch.inf: -448.0, 1.0625: 1.0, 1.1875: 1.25, 1.0703125: 1.125, 2.0**-9: 2.0**-9, 2.0**-10: 0.0,
        1.5 * 2.0**-10: 2.0**-9, torch.nan: torch.nan,
    }  # fmt: skip
    part = torch.zeros(1, 4, 1, 15).to(FP8)
    write(part, torch.tensor([2]), torch.tensor(list(cases), dtype=dtype).view(1, 1, 15))
    expected = torch.zeros(1, 4, 1, 15)
    expected[0, 2, 0] = torch.tensor(list(cases.values()))
    torch.testing.assert_close(part.float(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_attention_reads_float8_as_the_numbers_it_holds(dtype: torch.dtype) -> None:
    lengths, contexts = torch.tensor([1, 5, 1, 3]), torch.tensor([9, 5, 1, 12])
    tables = torch.arange(1, 13, dtype=torch.int32, device=DEVICE).view(4, 3)
    batch = AttentionBatch(
        slots=torch.arange(4, device=DEVICE),
        query_starts=torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(DEVICE),
        context_lens=contexts.to(DEVICE),
        block_tables=tables,
        slot_mapping=torch.full((10,), -1, device=DEVICE),
        single=False,
    )
    q = random(10, 4, 8).to(dtype)
    keys, values = (random(13, 4, 2, 8, seed=seed).to(FP8) for seed in (1, 2))
    for part in (keys, values):
        part.view(torch.uint8)[0] = 0
    plan = plan_attention(batch, 4, dtype)
    found = attend(q, (keys, values), plan, 0.3)
    assert found.dtype is dtype
    assert torch.equal(found, attend(q, (keys.to(dtype), values.to(dtype)), plan, 0.3))
    if dtype is torch.bfloat16 and DEVICE == "cpu":
        return  # the interpreter multiplies it wrongly
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_size": 8}
    work = kernels.plan_attention(
        batch.slots, batch.query_starts, batch.context_lens, 10, **sizes, dtype=dtype, single=False
    )
    by_kernel = kernels.paged_attention(q, keys, values, tables, 0.3, work)
    tolerance = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(by_kernel, found, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_stale_entries_of_a_float8_block_are_not_seen(dtype: torch.dtype) -> None:
    batch = AttentionBatch(
        slots=torch.tensor([0], device=DEVICE),
        query_starts=torch.tensor([0, 1], device=DEVICE),
        context_lens=torch.tensor([6], device=DEVICE),
        block_tables=torch.tensor([[2, 1]], dtype=torch.int32, device=DEVICE),
        slot_mapping=torch.tensor([5], device=DEVICE),
        single=True,
    )
    cache = tuple(random(3, 4, 2, 8, seed=seed).to(FP8) for seed in (1, 2))
    q, plan = random(1, 4, 8).to(dtype), plan_attention(batch, 4, dtype)
    expected = attend(q, (cache[0], cache[1]), plan, 0.3)
    for part in cache:
        part.view(torch.uint8)[1, 2:] = 0x7F  # NaN behind the context
    assert torch.equal(attend(q, (cache[0], cache[1]), plan, 0.3), expected)
    assert expected.isfinite().all()
