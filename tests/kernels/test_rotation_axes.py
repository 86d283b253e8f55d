"""Rotation by positions of several axes (M-RoPE) against `transformers`: the reference, and the kernel as elsewhere."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from omni_async_kernels.rotate_and_cache import rotate_and_cache
from torch import Tensor
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniTextConfig
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniRotaryEmbedding
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeTextConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeThinkerTextRotaryEmbedding,
    apply_rotary_pos_emb,
)
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from omni_async.backend.ops import HeadNorm, Rotary
from omni_async.backend.reference import rotary as reference
from omni_async.models.layers.rope import make_rotary

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]
NUM_HEADS, NUM_KV_HEADS = 3, 2

KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "sectioned": (Qwen2_5OmniTextConfig, Qwen2_5OmniRotaryEmbedding, {}),
    "interleaved": (Qwen3OmniMoeTextConfig, Qwen3OmniMoeThinkerTextRotaryEmbedding, {"mrope_interleaved": True}),
    "interleaved, other model": (Qwen3VLTextConfig, Qwen3VLTextRotaryEmbedding, {"mrope_interleaved": True}),
}
SIZES = [
    (128, 128, {"sectioned": [16, 24, 24], "interleaved": [24, 20, 20]}),
    (24, 24, {"sectioned": [2, 5, 5], "interleaved": [6, 3, 3]}),
    (22, 14, {"sectioned": [1, 4, 2], "interleaved": [3, 2, 2]}),  # a part of each head stays as it is
]
"""Head size, elements that are turned, pairs of each axis."""

TIMES = [0, 1, 1, 1, 1, 60, 7]
HEIGHTS = [0, 1, 1, 2, 2, 3, 7]
WIDTHS = [0, 1, 2, 1, 2, 59, 7]

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=[str(dtype).removeprefix("torch.") for dtype in DTYPES])
every_size = pytest.mark.parametrize(("head_size", "rotary_dim", "sections"), SIZES, ids=["full", "odd", "partial"])


@pytest.fixture(autouse=True)
def uninitialised_memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def positions() -> Tensor:
    return torch.tensor([TIMES, HEIGHTS, WIDTHS], device=DEVICE)


def make_config(kind: str, rotary_dim: int, sections: dict[str, list[int]]) -> Any:
    make, _, more = KINDS[kind]
    parameters = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections[kind.split(",")[0]], **more}
    sizes = {"hidden_size": 2 * rotary_dim, "num_attention_heads": 2, "head_dim": rotary_dim}
    return make(**sizes, max_position_embeddings=64, rope_parameters=parameters)


def expected(kind: str, config: Any, x: Tensor, rotary_dim: int) -> Tensor:
    """`transformers`' rotation of the first `rotary_dim` elements of `[T, heads, D]`, in float32."""
    cos, sin = KINDS[kind][1](config).to(DEVICE)(x.float(), positions()[:, None])
    turned, left = x[..., :rotary_dim].float(), x[..., rotary_dim:].float()
    turned = apply_rotary_pos_emb(turned[None], turned[None], cos, sin, unsqueeze_dim=2)[0][0]
    return torch.cat([turned, left], dim=-1)


def run_kernel(
    qkv: Tensor, at: Tensor, rotary: Rotary, head_size: int, slots: Tensor, norm: HeadNorm | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of each token."""
    keys, values = (qkv.new_full((3, 4, NUM_KV_HEADS, head_size), torch.nan) for _ in range(2))
    weights = (None, None, 0.0) if norm is None else (norm.query, norm.key, norm.eps)
    q = rotate_and_cache(
        qkv, at, rotary.cos, rotary.sin, *weights, keys, values, slots, NUM_HEADS, axes=rotary.axes
    )  # fmt: skip
    return q, keys.flatten(0, 1)[slots], values.flatten(0, 1)[slots]


@pytest.mark.parametrize("kind", KINDS)
@every_size
@every_dtype
def test_rotation_equals_transformers(
    kind: str, head_size: int, rotary_dim: int, sections: dict[str, list[int]], dtype: torch.dtype
) -> None:
    config = make_config(kind, rotary_dim, sections)
    rotary = make_rotary(config, rotary_dim, torch.device(DEVICE))
    qkv = random(len(TIMES), (NUM_HEADS + 2 * NUM_KV_HEADS) * head_size, dtype=dtype)
    heads = qkv.view(len(TIMES), -1, head_size)
    turned = expected(kind, config, heads[:, :-NUM_KV_HEADS], rotary_dim)

    found = reference.rotate(heads[:, :-NUM_KV_HEADS], positions(), rotary)
    assert found.dtype is dtype
    torch.testing.assert_close(found.float(), turned, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])

    slots = torch.tensor([3, 2, 1, 0, 8, 11, 5], device=DEVICE)
    q, keys, values = run_kernel(qkv, positions(), rotary, head_size, slots)
    found = torch.cat([q, keys], dim=1).float()
    torch.testing.assert_close(found, turned, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert torch.equal(values, heads[:, -NUM_KV_HEADS:])


@pytest.mark.parametrize("normed", [False, True])
@every_size
@every_dtype
def test_equal_positions_are_one_position(
    head_size: int, rotary_dim: int, sections: dict[str, list[int]], normed: bool, dtype: torch.dtype
) -> None:
    """Bit for bit: axes that agree, positions without axes, and a rotary without axes."""
    rotary = make_rotary(make_config("interleaved", rotary_dim, sections), rotary_dim, torch.device(DEVICE))
    plain = Rotary(rotary.cos, rotary.sin, rotary.rotary_dim)
    norm = HeadNorm(random(head_size, dtype=dtype) + 1, random(head_size, dtype=dtype, seed=1) + 1, 1e-6)
    qkv = random(len(TIMES), (NUM_HEADS + 2 * NUM_KV_HEADS) * head_size, dtype=dtype)
    slots = torch.arange(len(TIMES), device=DEVICE)
    one = torch.tensor(TIMES, device=DEVICE)
    three = one.expand(3, -1).contiguous()
    ways = [(one, plain), (one, rotary), (three, rotary)]
    results = [run_kernel(qkv, at, r, head_size, slots, norm if normed else None) for at, r in ways]
    for other in results[1:]:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(other, results[0], strict=True))
    x = qkv.view(len(TIMES), -1, head_size)
    turned = [reference.rotate(x, at, r) for at, r in ways]
    assert torch.equal(turned[1], turned[0])
    assert torch.equal(turned[2], turned[0])


def test_positions_of_several_axes_need_axes() -> None:
    plain = Rotary(torch.ones(8, 4, device=DEVICE), torch.zeros(8, 4, device=DEVICE), 8)
    at, qkv = torch.zeros(3, 2, dtype=torch.long, device=DEVICE), random(2, (NUM_HEADS + 2 * NUM_KV_HEADS) * 8)
    with pytest.raises(ValueError, match="axes"):
        reference.rotate(qkv.view(2, -1, 8), at, plain)
    with pytest.raises(ValueError, match="axes"):
        run_kernel(qkv, at, plain, 8, torch.arange(2, device=DEVICE))
