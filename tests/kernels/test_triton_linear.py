"""Products with few rows against the plain composition: on a CUDA device if there is one, else in the interpreter.

Outputs hold NaN before each call; the interpreter multiplies bfloat16 wrongly, so that is for the device.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from omni_async_kernels import launch, linear_tiles
from omni_async_kernels.linear import linear, product
from omni_async_kernels.linear_parts import Norm
from omni_async_kernels.linear_tiles import Tile, read_tuned, tiles
from omni_async_kernels.norm_linear import norm_linear
from torch import Tensor

from omni_async.backend.reference.ops import ReferenceOps

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]
EPS = 1e-6
TILE = Tile(rows=16, block_k=64, num_warps=4, num_stages=2)
on_device = pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=[str(dtype).removeprefix("torch.") for dtype in DTYPES])

pytestmark = [
    # Triton's interpreter makes the bounds of a loop from arrays of one element.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
    # Asked for only to have outputs filled with NaN.
    pytest.mark.filterwarnings("ignore:Deterministic behavior was enabled:UserWarning"),
]


@pytest.fixture(autouse=True)
def uninitialised_memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, device=DEVICE).to(dtype)


def random_weight(num_rows: int, size: int, dtype: torch.dtype) -> Tensor:
    """Of a size that keeps the product's values near 1."""
    return (random(num_rows, size, dtype=torch.float32, seed=7) * size**-0.5).to(dtype)


def expected_norm_linear(x: Tensor, norm_weight: Tensor, weight: Tensor, bias: Tensor | None, gated: bool) -> Tensor:
    return ReferenceOps().norm_linear(x, norm_weight, EPS, weight, bias, gated=gated)


def check(ours: Tensor, reference: Tensor, tolerance: float | None = None) -> None:
    assert ours.dtype == reference.dtype
    assert ours.shape == reference.shape
    assert ours.isfinite().all()
    error = (ours.float() - reference.float()).norm() / reference.float().norm()
    assert error < (tolerance or TOLERANCE[ours.dtype])


# -- both kernels, whatever the rule would choose -------------------------------------------------------------------


@each_dtype
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 16, 17, 70])
@pytest.mark.parametrize(("num_columns", "size"), [(5, 64), (37, 576)])
def test_the_product_is_that_of_the_reference(num_columns: int, size: int, num_tokens: int, dtype: torch.dtype) -> None:
    x, weight = random(num_tokens, size, dtype=dtype), random_weight(num_columns, size, dtype)
    bias = random(num_columns, dtype=dtype)
    residual = random(num_tokens, num_columns, dtype=dtype, seed=1)
    plain = product(x, weight, bias, TILE)
    check(plain, ReferenceOps().linear(x, weight, bias))
    # Rounded before the addition.
    assert torch.equal(product(x, weight, bias, TILE, residual=residual), plain + residual)


@each_dtype
@pytest.mark.parametrize("num_tokens", [1, 3, 17])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize(("num_columns", "size"), [(6, 64), (20, 200)])
def test_a_norm_within_the_product(
    num_columns: int, size: int, gated: bool, num_tokens: int, dtype: torch.dtype
) -> None:
    x, weight = random(num_tokens, size, dtype=dtype) * 20, random_weight(2 * num_columns, size, dtype)
    norm_weight, bias = random(size, dtype=dtype) + 1, random(2 * num_columns, dtype=dtype)
    before = x.clone()
    y = product(x, weight, bias, TILE, norm=Norm(norm_weight, EPS), gated=gated)
    check(y, expected_norm_linear(x, norm_weight, weight, bias, gated))
    assert torch.equal(x, before)


@pytest.mark.parametrize("num_columns", [1, 3, 100])
@pytest.mark.parametrize("tile", [Tile(4, 64, 1), Tile(2, 128, 2), Tile(1, 1024, 4)], ids=str)
def test_one_row_in_any_tile(tile: Tile, num_columns: int) -> None:
    x, residual = random(1, 576, dtype=torch.float32), random(1, num_columns, dtype=torch.float32, seed=1)
    norm_weight, weight = random(576, dtype=torch.float32), random_weight(num_columns, 576, torch.float32)
    y = product(x, weight, None, tile, norm=Norm(norm_weight, EPS), residual=residual)
    check(y, expected_norm_linear(x, norm_weight, weight, None, False) + residual)


@each_dtype
def test_rows_do_not_affect_each_other(dtype: torch.dtype) -> None:
    x, residual = random(5, 96, dtype=dtype), random(5, 12, dtype=dtype, seed=1)
    norm_weight, weight = random(96, dtype=dtype), random_weight(24, 96, dtype)

    def run() -> Tensor:
        return product(x, weight, None, TILE, norm=Norm(norm_weight, EPS), gated=True, residual=residual)

    before = run()
    x[[0, 1]] = torch.nan
    residual[4] = torch.nan
    after = run()
    assert torch.equal(after[2:4], before[2:4])
    assert after[[0, 1, 4]].isnan().all()


# -- what the rule and the table choose -----------------------------------------------------------------------------


@each_dtype
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 5, 20])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_norm_linear(gated: bool, num_tokens: int, dtype: torch.dtype) -> None:
    x, weight = random(num_tokens, 48, dtype=dtype), random_weight(40, 48, dtype)
    norm_weight = random(48, dtype=dtype) + 1
    y = norm_linear(x, norm_weight, EPS, weight, gated=gated)
    if num_tokens:
        check(y, expected_norm_linear(x, norm_weight, weight, None, gated))
    else:
        assert y.shape == (0, 20 if gated else 40)


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_float16_does_not_overflow_before_the_norm_divides(num_tokens: int) -> None:
    x = random(num_tokens, 64, dtype=torch.float16) * 4000
    norm_weight, weight = torch.full_like(x[0], 50), random_weight(8, 64, torch.float16)
    y = norm_linear(x, norm_weight, EPS, weight, gated=False)
    check(y, expected_norm_linear(x, norm_weight, weight, None, False))


@each_dtype
@pytest.mark.parametrize("num_tokens", [0, 1, 3, 20])
@pytest.mark.parametrize("out_dtype", [None, torch.float32])
def test_linear(out_dtype: torch.dtype | None, num_tokens: int, dtype: torch.dtype) -> None:
    x, weight, bias = random(num_tokens, 48, dtype=dtype), random_weight(40, 48, dtype), random(40, dtype=dtype)
    y = linear(x, weight, bias, out_dtype=out_dtype)
    if not num_tokens:
        assert (y.shape, y.dtype) == ((0, 40), out_dtype or dtype)
    elif out_dtype is None:
        check(y, ReferenceOps().linear(x, weight, bias))
    else:  # not rounded to the run dtype on the way
        check(y, ReferenceOps().linear(x.float(), weight.float(), bias.float()), 2e-5)


@each_dtype
@pytest.mark.parametrize("num_tokens", [0, 1, 3, 20])
@pytest.mark.parametrize("biased", [False, True])
def test_linear_adds_a_residual(biased: bool, num_tokens: int, dtype: torch.dtype) -> None:
    """By our product and by torch's, which may take the residual's memory."""
    x, weight = random(num_tokens, 48, dtype=dtype), random_weight(40, 48, dtype)
    bias, residual = random(40, dtype=dtype) if biased else None, random(num_tokens, 40, dtype=dtype, seed=1)
    expected = ReferenceOps().linear(x, weight, bias) + residual
    y = linear(x, weight, bias, residual)
    if num_tokens:
        check(y, expected)
    else:
        assert (y.shape, y.dtype) == ((0, 40), dtype)


@pytest.mark.parametrize("fuse_norm", [False, True])
def test_the_table_comes_before_the_rule(fuse_norm: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tile = {"rows": 32, "block_k": 16, "num_warps": 2, "num_stages": 2, "fuse_norm": fuse_norm}
    key = {"kind": "norm_linear_gated", "tokens": 32, "rows": 40, "size": 48}
    path = tmp_path / "tuned.json"
    path.write_text(json.dumps([{**key, "tile": tile}, {**key, "tokens": 16, "tile": None}]))
    table = read_tuned(path)
    monkeypatch.setattr(linear_tiles, "_TUNED", table)
    assert tiles("norm_linear_gated", 20, 40, 48, 2) == Tile(**tile)
    assert tiles("norm_linear_gated", 32, 40, 48, 2) == Tile(**tile)
    assert tiles("norm_linear_gated", 9, 40, 48, 2) is None
    assert tiles("norm_linear_gated", 8, 40, 48, 2) is not None
    assert tiles("norm_linear", 16, 40, 48, 2) is not None
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float16
    norm_weight, weight = random(48, dtype=dtype), random_weight(40, 48, dtype)
    for num_tokens in (16, 20):
        x = random(num_tokens, 48, dtype=dtype)
        y = norm_linear(x, norm_weight, EPS, weight, gated=True)
        check(y, expected_norm_linear(x, norm_weight, weight, None, True))


SHAPES = [
    (6144, 4096),
    (4096, 12288),
    (24576, 4096),
    (4096, 1024),
    (1024, 2048),
    (6144, 1024),
    (1024, 3072),
    (128, 2048),
]


@pytest.mark.parametrize(("num_rows", "size"), SHAPES)
@pytest.mark.parametrize("element_size", [2, 4])
@pytest.mark.parametrize("kind", ["linear", "linear_add", "norm_linear", "norm_linear_gated"])
def test_the_rule_fits_the_device(
    kind: linear_tiles.Kind, element_size: int, num_rows: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_tiles, "_TUNED", {})  # what was tuned ran on the device
    for num_tokens in (1, 2, 4, 8, 16):
        tile = tiles(kind, num_tokens, num_rows, size, element_size)
        if element_size == 4 and num_tokens > 1:
            assert tile is None
            continue
        assert tile is not None
        parts = 2 if kind == "norm_linear_gated" else 1
        weights = parts * tile.rows * tile.block_k * element_size
        if num_tokens == 1:  # in registers: at most 128 bytes a thread, or one row
            assert weights <= 128 * 32 * tile.num_warps or tile.rows == 1
        else:
            assert tile.num_stages * (weights + 2 * 16 * tile.block_k * element_size) < 227 * 1024
        programs = -(-num_rows // parts // tile.rows)
        assert programs >= 64 or tile.rows == (1 if num_tokens == 1 else 16)


# -- on the device --------------------------------------------------------------------------------------------------


@on_device
@pytest.mark.parametrize("num_tokens", [1, 2, 7, 16, 64])
@pytest.mark.parametrize(("num_rows", "size"), [*SHAPES, (151936, 1024)])
def test_true_shapes(num_rows: int, size: int, num_tokens: int) -> None:
    x, residual = (random(num_tokens, n, dtype=torch.bfloat16, seed=1) for n in (size, num_rows))
    norm_weight = random(size, dtype=torch.bfloat16) + 1
    weight = random_weight(num_rows, size, torch.bfloat16)
    expected = ReferenceOps().linear(x, weight)
    check(linear(x, weight), expected)
    check(linear(x, weight, residual=residual.clone()), expected + residual)
    for gated in (False, True):
        y = norm_linear(x, norm_weight, EPS, weight, gated=gated)
        check(y, expected_norm_linear(x, norm_weight, weight, None, gated))


@on_device
@pytest.mark.parametrize("num_tokens", [8, 64])
@pytest.mark.parametrize("rows", [16, 64])
def test_a_norm_within_the_product_at_many_rows(rows: int, num_tokens: int) -> None:
    """Both kinds of matrix instruction, also where the rule would take torch's product."""
    tile = Tile(rows, 128, num_warps=4, num_stages=3)
    x, residual = random(num_tokens, 1024, dtype=torch.bfloat16), random(num_tokens, 6144, dtype=torch.bfloat16)
    norm_weight, weight = random(1024, dtype=torch.bfloat16), random_weight(6144, 1024, torch.bfloat16)
    norm = Norm(norm_weight, EPS)
    plain = product(x, weight, None, tile, norm=norm)
    check(plain, expected_norm_linear(x, norm_weight, weight, None, False))
    assert torch.equal(product(x, weight, None, tile, norm=norm, residual=residual), plain + residual)
    gated = product(x, weight, None, tile, norm=norm, gated=True)
    check(gated, expected_norm_linear(x, norm_weight, weight, None, True))


@on_device
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 4, 16])
def test_a_chain_of_products_in_a_graph(num_tokens: int, overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each launch reads what the one before wrote, and an input is overwritten before each replay."""
    monkeypatch.setattr(launch, "OVERLAP", overlap)
    x, norm_weight = random(num_tokens, 1024, dtype=torch.bfloat16), random(1024, dtype=torch.bfloat16) * 0.1 + 1
    gate_up, down = random_weight(6144, 1024, torch.bfloat16), random_weight(1024, 3072, torch.bfloat16)

    def chain() -> Tensor:
        y = -x  # not `x` itself: the memory of a residual may be taken
        for _ in range(8):
            y = linear(norm_linear(y, norm_weight, EPS, gate_up, gated=True), down, residual=y)
        return y

    torch.cuda.synchronize()
    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = chain()
    for seed in (3, 4, 5):
        x.copy_(random(num_tokens, 1024, dtype=torch.bfloat16, seed=seed))
        graph.replay()
        monkeypatch.setattr(launch, "OVERLAP", False)
        assert torch.equal(replayed, chain())
