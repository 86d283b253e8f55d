"""The Triton backend against the reference: on a CUDA device if there is one, else in Triton's interpreter.

Outputs hold NaN before each call; the interpreter multiplies bfloat16 wrongly, so that is for the device.
"""

from collections.abc import Iterator

import omni_async_kernels as kernels
import pytest
import torch
from torch import Tensor

from omni_async.backend.ops import HeadNorm, Ops, Rotary
from omni_async.backend.reference.ops import ReferenceOps
from omni_async.backend.reference.rotary import rotate_and_cache
from omni_async.backend.triton import TritonOps

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]

pytestmark = [
    pytest.mark.parametrize("dtype", DTYPES, ids=[str(dtype).removeprefix("torch.") for dtype in DTYPES]),
    # Triton's interpreter makes the bounds of a loop from arrays of one element.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
]


@pytest.fixture
def ops() -> Ops:
    return TritonOps()


@pytest.fixture(autouse=True)
def uninitialised_memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(DEVICE, dtype)


def check(ours: Tensor, reference: Tensor) -> None:
    """Against the reference in float32, relative to the size of its values."""
    assert ours.dtype is not torch.float32 or reference.dtype is torch.float32
    assert ours.isfinite().all()
    error = (ours.float() - reference.float()).norm() / reference.float().norm().clamp(min=1e-9)
    assert error < TOLERANCE[ours.dtype]
    assert (ours.float() - reference.float()).abs().max() < 40 * TOLERANCE[ours.dtype]


@pytest.mark.parametrize("shape", [(1, 8), (3, 100), (5, 576), (2, 4096)])
def test_rms_norm(ops: Ops, shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, weight = random(*shape, dtype=dtype), random(shape[1], dtype=dtype) + 1
    before = x.clone()
    check(ops.rms_norm(x, weight, 1e-6), ReferenceOps().rms_norm(x, weight, 1e-6))
    assert torch.equal(x, before)


@pytest.mark.parametrize("shape", [(1, 8), (3, 96), (4, 1537), (2, 6144)])
def test_silu_and_mul(ops: Ops, shape: tuple[int, int], dtype: torch.dtype) -> None:
    gate_up = random(shape[0], 2 * shape[1], dtype=dtype)
    check(ops.silu_and_mul(gate_up), ReferenceOps().silu_and_mul(gate_up))


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_size", "rotary_dim"),
    [(4, 2, 16, 16), (9, 3, 64, 64), (6, 1, 96, 96), (4, 4, 80, 32), (8, 2, 128, 64)],
)
def test_rotate_and_cache(
    num_heads: int, num_kv_heads: int, head_size: int, rotary_dim: int, normed: bool, dtype: torch.dtype
) -> None:
    num_tokens, num_blocks, block_size = 7, 5, 4
    qkv = random(num_tokens, (num_heads + 2 * num_kv_heads) * head_size, dtype=dtype)
    angles = random(50, rotary_dim // 2, dtype=torch.float32)
    rotary = Rotary(angles.cos(), angles.sin(), rotary_dim)
    norm = None
    if normed:
        norm = HeadNorm(random(head_size, dtype=dtype) + 1, random(head_size, dtype=dtype, seed=1) + 1, 1e-6)
    positions = torch.tensor([0, 1, 2, 49, 7, 7, 30], device=DEVICE)
    slots = torch.tensor([4, 19, 5, -1, 10, 11, 16], device=DEVICE)
    shape = (num_blocks, block_size, num_kv_heads, head_size)
    ours = random(*shape, dtype=dtype), random(*shape, dtype=dtype, seed=1)
    theirs = ours[0].clone(), ours[1].clone()
    weights = (None, None, 0.0) if norm is None else (norm.query, norm.key, norm.eps)
    q = kernels.rotate_and_cache(qkv, positions, rotary.cos, rotary.sin, *weights, *ours, slots, num_heads)
    expected = rotate_and_cache(qkv, positions, rotary, norm, theirs, slots, num_heads)
    check(q, expected)
    untouched = [s for s in range(num_blocks * block_size) if s not in slots.tolist()]
    for mine, other in zip(ours, theirs, strict=True):
        check(mine, other)
        assert torch.equal(mine.flatten(0, 1)[untouched], other.flatten(0, 1)[untouched])
