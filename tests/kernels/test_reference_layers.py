"""The reference's token-wise operations against formulas written out in float64."""

import pytest
import torch
from torch import Tensor

from omni_async.backend.ops import HeadNorm, Rotary
from omni_async.backend.reference.ops import ReferenceOps
from omni_async.backend.reference.rotary import rotate_and_cache

OPS = ReferenceOps()
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPSILON = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}

pytestmark = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def noise(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=EPSILON[dtype], atol=EPSILON[dtype])


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 40])
@pytest.mark.parametrize("biased", [False, True])
def test_linear(dtype: torch.dtype, num_tokens: int, biased: bool) -> None:
    x, weight = noise(num_tokens, 24, dtype=dtype), noise(17, 24, dtype=dtype, seed=1) / 5
    bias = noise(17, dtype=dtype, seed=2) if biased else None
    expected = torch.einsum("ti,oi->to", x.double(), weight.double())
    check(OPS.linear(x, weight, bias), expected if bias is None else expected + bias.double(), dtype)


@pytest.mark.parametrize("num_tokens", [1, 40])
@pytest.mark.parametrize("biased", [False, True])
def test_linear_adds_a_residual(dtype: torch.dtype, num_tokens: int, biased: bool) -> None:
    """To the product as it is rounded without it."""
    x, weight = noise(num_tokens, 24, dtype=dtype), noise(17, 24, dtype=dtype, seed=1) / 5
    bias = noise(17, dtype=dtype, seed=2) if biased else None
    residual = noise(num_tokens, 17, dtype=dtype, seed=3) * 4
    expected = residual + OPS.linear(x, weight, bias)
    assert torch.equal(OPS.linear(x, weight, bias, residual), expected)


@pytest.mark.parametrize("gated", [False, True])
def test_norm_linear(dtype: torch.dtype, gated: bool) -> None:
    x, norm_weight = noise(5, 24, dtype=dtype), noise(24, dtype=dtype, seed=1)
    weight, bias = noise(18, 24, dtype=dtype, seed=2) / 5, noise(18, dtype=dtype, seed=3)
    before = x.clone()
    expected = torch.einsum("ti,oi->to", rms_norm(x, norm_weight, 1e-5), weight.double()) + bias.double()
    if gated:
        gate, up = expected.chunk(2, dim=1)
        expected = gate / (1 + (-gate).exp()) * up
    found = OPS.norm_linear(x, norm_weight, 1e-5, weight, bias, gated=gated)
    assert found.dtype == dtype
    assert (found.double() - expected).norm() < EPSILON[dtype] * expected.norm()
    assert torch.equal(x, before)


def test_linear_takes_strided_rows(dtype: torch.dtype) -> None:
    x, weight = noise(6, 48, dtype=dtype)[::2, 12:36], noise(17, 24, dtype=dtype, seed=1) / 5
    check(OPS.linear(x, weight), torch.einsum("ti,oi->to", x.double(), weight.double()), dtype)


def test_embedding(dtype: torch.dtype) -> None:
    weight = noise(9, 4, dtype=dtype)
    found = OPS.embedding(torch.tensor([8, 0, 8]), weight)
    assert torch.equal(found, torch.stack([weight[8], weight[0], weight[8]]))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def test_rms_norm(dtype: torch.dtype) -> None:
    # Values of the size of eps' root, so that eps counts.
    x, weight = noise(5, 64, dtype=dtype) / 30, noise(64, dtype=dtype, seed=1)
    check(OPS.rms_norm(x, weight, 1e-3), rms_norm(x, weight, 1e-3), dtype)


def test_silu_and_mul(dtype: torch.dtype) -> None:
    x = noise(3, 20, dtype=dtype) * 3
    before = x.clone()
    gate, up = x[:, :10].double(), x[:, 10:].double()
    check(OPS.silu_and_mul(x), gate / (1 + (-gate).exp()) * up, dtype)
    assert torch.equal(x, before)


def rotated(x: Tensor, positions: Tensor, rotary: Rotary) -> Tensor:
    """Pairs of elements as complex numbers, each multiplied by one of its position."""
    half = rotary.rotary_dim // 2
    turns = torch.complex(rotary.cos.double(), rotary.sin.double())[positions][:, None]
    pairs = torch.complex(x[..., :half].double(), x[..., half : 2 * half].double()) * turns
    return torch.cat([pairs.real, pairs.imag, x[..., 2 * half :].double()], dim=-1)


@pytest.mark.parametrize("rotary_dim", [16, 8])
@pytest.mark.parametrize("normed", [False, True])
def test_rotate_and_cache(dtype: torch.dtype, rotary_dim: int, normed: bool) -> None:
    num_heads, num_kv_heads, head_size, block_size = 6, 2, 16, 4
    angles = torch.outer(torch.arange(50.0), torch.rand(rotary_dim // 2, generator=torch.Generator().manual_seed(3)))
    rotary = Rotary(angles.cos(), angles.sin(), rotary_dim)
    norm = HeadNorm(noise(16, dtype=dtype, seed=4), noise(16, dtype=dtype, seed=5), 1e-5) if normed else None
    positions = torch.tensor([0, 49, 7, 8])
    slots = torch.tensor([9, 4, -1, 22])
    qkv = noise(4, (num_heads + 2 * num_kv_heads) * head_size, dtype=dtype)
    before = qkv.clone()
    cache = tuple(noise(6, block_size, num_kv_heads, head_size, dtype=dtype, seed=seed) for seed in (6, 7))
    untouched = [part.clone() for part in cache]
    found = rotate_and_cache(qkv, positions, rotary, norm, (cache[0], cache[1]), slots, num_heads)

    heads = qkv.double().view(4, -1, head_size)
    query, key, value = heads[:, :num_heads], heads[:, num_heads:-num_kv_heads], heads[:, -num_kv_heads:]
    if norm is not None:
        query, key = rms_norm(query, norm.query, norm.eps), rms_norm(key, norm.key, norm.eps)
    check(found, rotated(query, positions, rotary), dtype)
    for part, old, new in zip(cache, untouched, (rotated(key, positions, rotary), value), strict=True):
        flat, old_flat = part.flatten(0, 1), old.flatten(0, 1)
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                check(flat[slot], new[token], dtype)
        others = [slot for slot in range(24) if slot not in slots.tolist()]
        assert torch.equal(flat[others], old_flat[others])
    assert torch.equal(qkv, before)


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 13])
def test_moe(dtype: torch.dtype, renormalise: bool, num_tokens: int) -> None:
    num_experts, top_k, inner = 5, 2, 12
    x, router = noise(num_tokens, 8, dtype=dtype), noise(num_tokens, num_experts, dtype=dtype, seed=1) * 2
    router[:, 3] = -20  # an expert that no token chooses
    gate_up = noise(num_experts, 2 * inner, 8, dtype=dtype, seed=2) / 3
    down = noise(num_experts, 8, inner, dtype=dtype, seed=3) / 3
    residual = noise(num_tokens, 8, dtype=dtype, seed=4)
    expected = residual.double()
    for token in range(num_tokens):
        exps = router[token].double().exp()
        shares = {expert: float(exps[expert] / exps.sum()) for expert in range(num_experts)}
        chosen = sorted(shares, key=lambda expert: -shares[expert])[:top_k]
        total = sum(shares[expert] for expert in chosen) if renormalise else 1.0
        for expert in chosen:
            hidden = gate_up[expert].double() @ x[token].double()
            hidden = hidden[:inner] / (1 + (-hidden[:inner]).exp()) * hidden[inner:]
            expected[token] += shares[expert] / total * (down[expert].double() @ hidden)
    check(OPS.moe(x, router, gate_up, down, top_k, renormalise, residual), expected, dtype)
