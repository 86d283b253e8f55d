"""The mixture of experts against the reference: on a CUDA device if there is one, else in Triton's interpreter.

Scratch and outputs hold NaN (the largest integer) before each call; the interpreter multiplies bfloat16 wrongly, so
that is for the device. Logits differ within a row except where ties are tested: torch's `topk` has no order for them.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from omni_async_kernels.moe import FEW, TILINGS, moe
from omni_async_kernels.moe_routing import route
from omni_async_kernels.moe_sort import sort_by_expert
from torch import Tensor

from omni_async.backend.reference.moe import moe as reference_moe

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=[str(dtype).removeprefix("torch.") for dtype in DTYPES])
# On the device these operations are silent.
with_nan = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
on_the_device = pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter would take minutes")

# Triton's interpreter makes the bounds of a loop from arrays of one element.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")


@contextmanager
def uninitialised_memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, device=DEVICE).to(dtype)


def distinct_logits(num_tokens: int, num_experts: int, dtype: torch.dtype) -> Tensor:
    """Each row a permutation of numbers 1/32 apart, which two bytes hold exactly up to 128 experts."""
    order = torch.rand((num_tokens, num_experts), generator=torch.Generator().manual_seed(num_tokens)).argsort(dim=1)
    return (order / 32 - num_experts / 64).to(DEVICE, dtype)


def weights(num_experts: int, hidden_size: int, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    gate_up = random(num_experts, 2 * size, hidden_size, dtype=dtype) * hidden_size**-0.5
    return gate_up, random(num_experts, hidden_size, size, dtype=dtype) * size**-0.5


def check(ours: Tensor, expected: Tensor) -> None:
    """Relative to the size of the values."""
    assert ours.isfinite().all()
    error = (ours.float() - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert error.max() < TOLERANCE[ours.dtype]


def run(
    x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor, top_k: int, renormalise: bool, residual: Tensor
) -> Tensor:
    with uninitialised_memory_is_nan():
        return moe(x, logits, gate_up, down, top_k, renormalise, residual)


def reference(
    x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor, top_k: int, renormalise: bool, residual: Tensor
) -> Tensor:
    return reference_moe(x.float(), logits, gate_up.float(), down.float(), top_k, renormalise) + residual.float()


SHAPES = {
    "one token": (1, 8, 64, 32, 2),
    "one token, all experts": (1, 5, 48, 32, 5),
    "one token, longer than a block": (1, 3, 264, 1048, 2),
    "few tokens": (3, 24, 64, 32, 2),
    "few tokens, odd sizes": (3, 100, 44, 26, 3),
    "tiles of 16": (9, 12, 64, 48, 3),
    "tiles of 16, odd sizes": (9, 3, 44, 26, 2),
    "tiles of 16, all experts": (4, 6, 64, 32, 6),
    "tiles of 16, longer than a block": (5, 5, 264, 72, 2),
    "tiles of 32": (40, 2, 64, 32, 1),
    "tiles of 64": (30, 2, 64, 24, 2),
    "tiles of 128": (107, 2, 32, 24, 1),
}


@every_dtype
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_reference(shape: tuple[int, int, int, int, int], dtype: torch.dtype) -> None:
    num_tokens, num_experts, hidden_size, size, top_k = shape
    x, logits = random(num_tokens, hidden_size, dtype=dtype), distinct_logits(num_tokens, num_experts, dtype)
    gate_up, down = weights(num_experts, hidden_size, size, dtype)
    residual = random(num_tokens, hidden_size, dtype=dtype, seed=1)
    inputs = x, logits, gate_up, down, top_k, num_tokens % 2 == 0, residual
    before = [t.clone() for t in (x, logits, gate_up, down, residual)]
    ours = run(*inputs)
    check(ours, reference(*inputs))
    assert ours.dtype is dtype
    assert all(torch.equal(a, b) for a, b in zip(before, (x, logits, gate_up, down, residual), strict=True))
    assert torch.equal(ours, run(*inputs))


def test_shapes_reach_every_way() -> None:
    few = {name for name, (t, e, _, _, k) in SHAPES.items() if t == 1 or t * k * FEW <= e}
    assert few == {name for name in SHAPES if "token" in name}
    means = [t * k / e for name, (t, e, _, _, k) in SHAPES.items() if name not in few]
    reached = {next(tiling.tile_size for tiling in TILINGS if mean <= tiling.max_mean) for mean in means}
    assert reached == {tiling.tile_size for tiling in TILINGS}


@every_dtype
@pytest.mark.parametrize("expert", [0, 4])
def test_all_tokens_to_one_expert(expert: int, dtype: torch.dtype) -> None:
    """Several tiles of one expert, the others unused."""
    x, logits = random(37, 32, dtype=dtype), distinct_logits(37, 5, dtype)
    logits[:, expert] = 4
    gate_up, down = weights(5, 32, 24, dtype)
    unused = [other for other in range(5) if other != expert]
    gate_up[unused] = down[unused] = torch.nan
    residual = random(37, 32, dtype=dtype, seed=1)
    check(run(x, logits, gate_up, down, 1, True, residual), reference(x, logits, gate_up, down, 1, True, residual))


@with_nan
@every_dtype
@pytest.mark.parametrize(("num_tokens", "num_experts"), [(3, 40), (30, 6)])
def test_rows_of_nan(num_tokens: int, num_experts: int, dtype: torch.dtype) -> None:
    """Padding may hold anything; the other rows have the results that they have without it."""
    x, logits = random(num_tokens, 64, dtype=dtype), distinct_logits(num_tokens, num_experts, dtype)
    gate_up, down = weights(num_experts, 64, 32, dtype)
    residual = random(num_tokens, 64, dtype=dtype, seed=1)
    expected = reference(x, logits, gate_up, down, 3, True, residual)
    padding = [row for row in range(num_tokens) if row % 3 == 1]
    kept = [row for row in range(num_tokens) if row % 3 != 1]
    x[padding] = torch.nan
    logits[padding] = torch.nan
    logits[padding[0], 0] = torch.inf
    residual[padding] = torch.nan
    check(run(x, logits, gate_up, down, 3, True, residual)[kept], expected[kept])


@every_dtype
def test_no_tokens(dtype: torch.dtype) -> None:
    gate_up, down = weights(4, 32, 16, dtype)
    x = random(0, 32, dtype=dtype)
    out = moe(x, random(0, 4, dtype=dtype), gate_up, down, 2, True, x)
    assert out.shape == (0, 32)
    assert out.dtype is dtype


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize(("num_experts", "top_k"), [(8, 1), (60, 4), (7, 7), (130, 10)])
def test_routing(num_experts: int, top_k: int, renormalise: bool) -> None:
    """Many ties: the lowest id goes first. A stable sort has that order."""
    logits = random(20, num_experts, dtype=torch.float32).mul(2).round().div(2)
    logits[0] = 0
    logits[1] = -0.0
    logits[1, 1] = 0.0
    logits[2] = -torch.inf
    logits[2, num_experts // 2 :] = 0
    with uninitialised_memory_is_nan():
        experts, chosen = route(logits, top_k, renormalise)
    probabilities, order = logits.softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
    expected = probabilities[:, :top_k]
    if renormalise:
        expected = expected / expected.sum(dim=-1, keepdim=True)
    assert torch.equal(experts.long(), order[:, :top_k])
    torch.testing.assert_close(chosen, expected, rtol=1e-5, atol=1e-7)


@with_nan
def test_routing_of_nan() -> None:
    logits = torch.full((6, 9), torch.nan, device=DEVICE)
    logits[1, 3] = 0
    logits[2] = torch.inf
    logits[3] = -torch.inf
    logits[4, 1:] = 1
    logits[5] = 1
    experts, chosen = route(logits, 4, True)
    assert all(sorted(set(row)) == sorted(row) and set(row) <= set(range(9)) for row in experts.tolist())
    assert chosen[:5].isnan().all()
    assert chosen[5].isfinite().all()


@pytest.mark.parametrize("tile_size", [16, 64])
@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), [(1, 3, 2), (50, 12, 3), (1400, 3, 3)])
def test_sorting(num_tokens: int, num_experts: int, top_k: int, tile_size: int) -> None:
    """A stable order, and tiles that cover it. The last expert is unused; 4200 pairs are more than one block."""
    generator = torch.Generator().manual_seed(num_tokens)
    experts = torch.randint(num_experts - 1, (num_tokens, top_k), generator=generator).int().to(DEVICE)
    with uninitialised_memory_is_nan():
        pairs = sort_by_expert(experts, num_experts, tile_size)
    order = experts.flatten().argsort(stable=True)
    assert torch.equal(pairs.order.long(), order)
    sorted_experts = experts.flatten()[order].tolist()
    counts = [sorted_experts.count(expert) for expert in range(num_experts)]
    expected = [
        [expert, sum(counts[:expert]) + first, sum(counts[: expert + 1])]
        for expert, count in enumerate(counts)
        for first in range(0, count, tile_size)
    ]
    assert pairs.tiles[: int(pairs.num_tiles)].tolist() == expected


@on_the_device
@pytest.mark.parametrize("num_tokens", [1, 4, 16, 64, 300, 2048])
def test_true_sizes(num_tokens: int) -> None:
    """Qwen3-30B-A3B in one graph, replayed with other inputs: grids may not depend on what they hold."""
    gate_up, down = weights(128, 2048, 768, torch.bfloat16)
    x, logits = torch.zeros((num_tokens, 2048)).to(gate_up), torch.zeros((num_tokens, 128)).to(gate_up)
    residual = torch.zeros_like(x)
    moe(x, logits, gate_up, down, 8, True, residual)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours = moe(x, logits, gate_up, down, 8, True, residual)
    for seed in range(2):
        x.copy_(random(num_tokens, 2048, dtype=torch.bfloat16, seed=seed))
        residual.copy_(random(num_tokens, 2048, dtype=torch.bfloat16, seed=seed + 2))
        logits.copy_(distinct_logits(num_tokens, 128, torch.bfloat16).roll(seed, dims=1))
        ours.fill_(torch.nan)
        graph.replay()
        check(ours, reference(x, logits, gate_up, down, 8, True, residual))


@on_the_device
@pytest.mark.parametrize(
    ("num_experts", "hidden_size", "size", "top_k"), [(128, 1024, 384, 6), (8, 1024, 3584, 2), (512, 2048, 512, 10)]
)
@pytest.mark.parametrize("num_tokens", [1, 5, 200])
def test_other_sizes(num_tokens: int, num_experts: int, hidden_size: int, size: int, top_k: int) -> None:
    """A talker's, a few large experts, many small ones; logits in float32, which holds 512 numbers 1/32 apart."""
    x, logits = (
        random(num_tokens, hidden_size, dtype=torch.bfloat16),
        distinct_logits(num_tokens, num_experts, torch.float32),
    )
    gate_up, down = weights(num_experts, hidden_size, size, torch.bfloat16)
    inputs = x, logits, gate_up, down, top_k, True, random(num_tokens, hidden_size, dtype=torch.bfloat16, seed=1)
    check(run(*inputs), reference(*inputs))
