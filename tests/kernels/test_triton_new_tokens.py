"""Attention that makes its queries, keys and values itself, against rotation and attention in two launches.

On a CUDA device if there is one, else in Triton's interpreter. Scratch, outputs and every cache entry that no row may
see hold NaN before each call, and so do the places of the new tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from omni_async_kernels import attend_new_tokens, attention_tiles, rotate_and_cache
from omni_async_kernels.attention_tiles import MIN_SPLIT
from omni_async_kernels.attention_work import AttentionWork
from omni_async_kernels.paged_attention import paged_attention
from torch import Tensor

from tests.kernels.test_triton_attention import DEVICE, FP8, Heads, Step, check, random

every_dtype = pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16] if DEVICE == "cuda" else [torch.float32, torch.float16], ids=str
)

pytestmark = [
    # Triton's interpreter makes the bounds of a loop from arrays of one element.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
    # On a device each case compiles three kernels.
    pytest.mark.timeout(120),
]

POSITIONS = 80
"""Of the tables of angles: a token's position need not be its place in the row."""
EPS = 1e-5


@pytest.fixture(autouse=True)
def uninitialised_memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


@dataclass(frozen=True)
class Layer:
    """What a layer's attention is made with."""

    heads: Heads
    rotary_dim: int
    normed: bool = False
    cache_dtype: torch.dtype | None = None
    window: int | None = None
    soft_cap: float | None = None
    k_scale: float = 1.0
    v_scale: float = 1.0
    axes: bool = False

    @property
    def scale(self) -> float:
        return self.heads.head_size**-0.5


@dataclass(frozen=True)
class Inputs:
    """One layer's inputs of a step."""

    qkv: Tensor
    positions: Tensor
    rotation: tuple[Tensor, Tensor]
    axes: Tensor | None
    norms: tuple[Tensor | None, Tensor | None]
    cache: tuple[Tensor, Tensor]
    slot_mapping: Tensor

    @classmethod
    def of(cls, step: Step, layer: Layer, dtype: torch.dtype, seed: int = 0) -> "Inputs":
        heads = layer.heads
        keys, values = step.cache(layer.cache_dtype or dtype, seed, layer.window)
        mapping = torch.full((step.num_tokens,), -1, device=DEVICE)
        for row in range(len(step.rows)):
            mapping[row] = step.places(row)[-1]
        for part in (keys, values):
            part.flatten(0, 1)[mapping[: len(step.rows)]] = torch.nan
        angles = random(POSITIONS, layer.rotary_dim // 2, seed=seed) * 3
        shape = (3, step.num_tokens) if layer.axes else (step.num_tokens,)
        return cls(
            qkv=random(step.num_tokens, (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_size, seed=seed).to(
                dtype
            ),
            positions=torch.randint(POSITIONS, shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE),
            rotation=(angles.cos(), angles.sin()),
            axes=torch.arange(layer.rotary_dim // 2, dtype=torch.int32, device=DEVICE) % 3 if layer.axes else None,
            norms=tuple((random(heads.head_size, seed=seed + part) / 4 + 1).to(dtype) for part in (1, 2))
            if layer.normed
            else (None, None),
            cache=(keys, values),
            slot_mapping=mapping,
        )

    def attend(self, step: Step, layer: Layer, work: AttentionWork) -> Tensor:
        return attend_new_tokens(
            self.qkv, self.positions, *self.rotation, self.axes, *self.norms, EPS, *self.cache, step.block_tables,
            self.slot_mapping, layer.heads.num_heads, layer.scale, work, window=layer.window, soft_cap=layer.soft_cap,
            k_scale=layer.k_scale, v_scale=layer.v_scale,
        )  # fmt: skip

    def rotate(self, layer: Layer) -> Tensor:
        return rotate_and_cache(
            self.qkv, self.positions, *self.rotation, *self.norms, EPS, *self.cache, self.slot_mapping,
            layer.heads.num_heads, self.axes,
        )  # fmt: skip

    def copy(self) -> "Inputs":
        keys, values = self.cache
        return replace(self, cache=(keys.clone(), values.clone()))


def check_cache(ours: Inputs, theirs: Inputs, layer: Layer) -> None:
    """Everywhere; the norms of keys may round another way, as threads share out a sum otherwise."""
    for mine, other, exact in zip(ours.cache, theirs.cache, (not layer.normed, True), strict=True):
        ulp = 0.0 if exact else torch.finfo(mine.dtype).eps
        mine, other = (part.float().nan_to_num(1e9) for part in (mine, other))
        torch.testing.assert_close(mine, other, rtol=2 * ulp, atol=4 * ulp)


def attend_and_check(step: Step, layer: Layer, dtype: torch.dtype, work: AttentionWork | None = None) -> None:
    ours = Inputs.of(step, layer, dtype)
    theirs = ours.copy()
    work = step.plan(dtype, layer.window) if work is None else work
    found = ours.attend(step, layer, work)
    q = theirs.rotate(layer)
    expected = paged_attention(
        q, *theirs.cache, step.block_tables, layer.scale, work, window=layer.window, soft_cap=layer.soft_cap,
        k_scale=layer.k_scale, v_scale=layer.v_scale,
    )  # fmt: skip
    check(found, expected[: len(step.rows)].float(), dtype)
    check_cache(ours, theirs, layer)
    keys, values = (part.float() * by for part, by in zip(ours.cache, (layer.k_scale, layer.v_scale), strict=True))
    dense = step.expected(q, (keys, values), layer.scale, layer.window, layer.soft_cap)
    check(found, dense, dtype)


SMALL = Heads(4, 2, 16)
CONTEXTS = [1, 2, 17, 65, 16]
LAYERS = {
    "norms": Layer(SMALL, 16, normed=True),
    "no norms": Layer(SMALL, 16),
    "part of a head, groups of three": Layer(Heads(6, 2, 64, 32), 32, normed=True),
    "one head each": Layer(Heads(2, 2, 96, 64), 96, normed=True),
    "groups of eight, capped": Layer(Heads(8, 1, 128), 128, normed=True, soft_cap=2.0),
    "large heads": Layer(Heads(4, 1, 256, 16), 64, normed=True),
    "eight bits": Layer(SMALL, 16, normed=True, cache_dtype=FP8, k_scale=0.5, v_scale=2.0),
    "eight bits, capped, in a window": Layer(Heads(8, 2, 128), 128, cache_dtype=FP8, window=20, soft_cap=3.0),
    "several axes": Layer(SMALL, 12, normed=True, axes=True),
}


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
@every_dtype
def test_one_launch_does_what_two_do(layer: Layer, dtype: torch.dtype) -> None:
    step = Step.of([(1, context) for context in CONTEXTS], layer.heads, padding_rows=2, padding_tokens=3)
    attend_and_check(step, layer, dtype)


@pytest.mark.parametrize("num_rows", [1, 70])
@every_dtype
def test_splits(num_rows: int, dtype: torch.dtype) -> None:
    # Few rows and many have tiles of their own; the last split of some holds nothing but the new token.
    contexts = [MIN_SPLIT, MIN_SPLIT + 1, MIN_SPLIT + 2, 2 * MIN_SPLIT, 2 * MIN_SPLIT + 1, 2 * MIN_SPLIT + 130]
    layer = Layer(SMALL, 16, normed=True)
    if num_rows == 1:
        for context in contexts:
            attend_and_check(Step.of([(1, context)], SMALL), layer, dtype)
    else:
        assert not attention_tiles.few(num_rows, SMALL.num_kv_heads)
        attend_and_check(Step.of([(1, context) for context in contexts + [3] * (num_rows - 6)], SMALL), layer, dtype)


@pytest.mark.parametrize("window", [1, 20, MIN_SPLIT] if DEVICE == "cpu" else [1, 300])
@every_dtype
def test_window(window: int, dtype: torch.dtype) -> None:
    layer = Layer(SMALL, 16, window=window)
    step = Step.of([(1, context) for context in (1, 2, 21, MIN_SPLIT + 70)], SMALL)
    attend_and_check(step, layer, dtype)
    # Of a plan for the whole context, splits that lie before the window have nothing to say.
    step = Step.of([(1, 2 * MIN_SPLIT + 1)], SMALL)
    attend_and_check(step, layer, dtype, step.plan(dtype))


@every_dtype
def test_a_slot_of_minus_one_writes_nothing(dtype: torch.dtype) -> None:
    step, layer = Step.of([(1, 20), (1, 1), (1, 5)], SMALL), Layer(SMALL, 16, normed=True)
    written = Inputs.of(step, layer, dtype)
    kept = written.copy()
    kept = replace(kept, slot_mapping=torch.full_like(kept.slot_mapping, -1))
    results = [inputs.attend(step, layer, step.plan(dtype)) for inputs in (written, kept)]
    # The new token is seen all the same.
    assert results[0].isfinite().all()
    assert torch.equal(*results)
    for mine, other in zip(kept.cache, written.cache, strict=True):
        places = written.slot_mapping
        assert mine.flatten(0, 1)[places].isnan().all()
        other.flatten(0, 1)[places] = torch.nan
        assert torch.equal(mine.nan_to_num(1e4), other.nan_to_num(1e4))


@every_dtype
def test_only_padding_is_no_work(dtype: torch.dtype) -> None:
    step, layer = Step.of([(1, 1), (1, 9)], SMALL, padding_tokens=2), Layer(SMALL, 16)
    inputs = Inputs.of(step, layer, dtype)
    before = inputs.copy()
    step.query_starts.zero_()
    step.context_lens.zero_()
    assert inputs.attend(step, layer, step.plan(dtype)).isnan().all()
    for mine, other in zip(inputs.cache, before.cache, strict=True):
        assert torch.equal(mine.nan_to_num(1e4), other.nan_to_num(1e4))


def test_what_cannot_be_is_refused() -> None:
    step, layer = Step.of([(1, 9)], SMALL), Layer(SMALL, 16, window=8)
    inputs = Inputs.of(step, layer, torch.float16)
    with pytest.raises(ValueError, match="window"):
        inputs.attend(step, layer, step.plan(torch.float16, 7))
    with pytest.raises(ValueError, match="tokens"):
        inputs.attend(step, layer, Step.of([(2, 9)], SMALL).plan(torch.float16))
    with pytest.raises(ValueError, match="axes"):
        replace(inputs, positions=inputs.positions.expand(3, -1)).attend(step, layer, step.plan(torch.float16))


@every_dtype
def test_one_work_serves_all_layers(dtype: torch.dtype) -> None:
    step, layer = Step.of([(1, MIN_SPLIT + 1), (1, 40)], SMALL), Layer(SMALL, 16, normed=True)
    work = step.plan(dtype)
    for _ in range(2):
        attend_and_check(step, layer, dtype, work)
        arrived = work.arrived[: int(work.counts[0])]
        assert arrived[work.splits[: len(arrived), 6] == 0].eq(0).all()
