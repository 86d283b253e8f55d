"""The backend's operations on a CUDA device, each against what its bytes and operations need at least."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor

from omni_async.backend.ops import Ops, Rotary, StepRows
from omni_async.measure import timing
from omni_async.measure.ceilings import Ceilings

NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 32, 8, 128, 16
ITEM = 2
"""Bytes of a bfloat16."""
DEVICE = "cuda"


@dataclass(frozen=True, slots=True)
class Case:
    """One operation on given inputs, and what it cannot do without."""

    work: Callable[[], object]
    num_bytes: int
    """Read and written at least."""
    flops: float = 0.0


@dataclass(frozen=True, slots=True)
class KernelTime:
    """The median time of one case."""

    name: str
    time_us: float
    limit_us: float

    @property
    def share(self) -> float:
        """Limit / time: 1 is the limit."""
        return self.limit_us / self.time_us


def _random(*shape: int, seed: int) -> Tensor:
    return timing.random(*shape, seed=seed, device=DEVICE)


def rms_norm(num_tokens: int, size: int, ops: Ops) -> Case:
    """Norm of rows."""
    x, weight = _random(num_tokens, size, seed=0), _random(size, seed=1)
    return Case(lambda: ops.rms_norm(x, weight, 1e-6), 2 * x.nbytes)


def silu_and_mul(num_tokens: int, size: int, ops: Ops) -> Case:
    """Gated activation."""
    gate_up = _random(num_tokens, 2 * size, seed=0)
    return Case(lambda: ops.silu_and_mul(gate_up), gate_up.nbytes * 3 // 2)


def linear(num_tokens: int, num_inputs: int, num_outputs: int, ops: Ops) -> Case:
    """Product of a few rows with a matrix."""
    x, weight = _random(num_tokens, num_inputs, seed=0), _random(num_outputs, num_inputs, seed=1)
    moved = x.nbytes + weight.nbytes + num_tokens * num_outputs * ITEM
    return Case(lambda: ops.linear(x, weight), moved, 2.0 * num_tokens * num_inputs * num_outputs)


def attention(num_rows: int, query_len: int, context_len: int, ops: Ops) -> Case:
    """Equal rows whose blocks lie scattered in the cache; rotation and the writing of new keys and values included."""
    per_row = context_len // BLOCK_SIZE
    num_blocks = num_rows * per_row + 1
    order = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(0)) + 1
    shape = (num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE)
    num_tokens = num_rows * query_len
    qkv = _random(num_tokens, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_SIZE, seed=0)
    angles = torch.arange(context_len, device=DEVICE)[:, None] / torch.arange(1, HEAD_SIZE // 2 + 1, device=DEVICE)
    rotary = Rotary(angles.cos(), angles.sin(), HEAD_SIZE)
    cache = _random(*shape, seed=1), _random(*shape, seed=2)
    rows = StepRows(
        slots=torch.arange(num_rows, dtype=torch.int32, device=DEVICE),
        starts=torch.full((num_rows,), context_len - query_len, dtype=torch.int32, device=DEVICE),
        query_starts=torch.arange(num_rows + 1, dtype=torch.int32, device=DEVICE) * query_len,
        new_places=torch.full((num_rows,), -1, dtype=torch.int32, device=DEVICE),
        new_blocks=torch.zeros(num_rows, dtype=torch.int32, device=DEVICE),
        sampled=torch.arange(num_rows, dtype=torch.int32, device=DEVICE),
        num_tokens=num_tokens,
        single=query_len == 1,
    )
    tokens = torch.zeros((num_rows, context_len), dtype=torch.int32, device=DEVICE)
    block_tables = order.view(num_rows, per_row).int().to(DEVICE)
    inputs = ops.prepare(rows, tokens, block_tables, BLOCK_SIZE)
    kv_bytes = NUM_KV_HEADS * HEAD_SIZE * ITEM
    pairs = num_rows * (query_len * context_len - query_len * (query_len - 1) / 2)
    return Case(
        lambda: ops.attention(qkv, inputs.positions, rotary, None, cache, inputs.attention, NUM_HEADS, HEAD_SIZE**-0.5),
        qkv.nbytes + num_tokens * NUM_HEADS * HEAD_SIZE * ITEM + 2 * num_rows * context_len * kv_bytes,
        4 * NUM_HEADS * HEAD_SIZE * pairs,
    )


CASES: Mapping[str, Callable[[Ops], Case]] = {
    "rms_norm, 8192 x 4096": partial(rms_norm, 8192, 4096),
    "silu_and_mul, 8192 x 12288": partial(silu_and_mul, 8192, 12288),
    "linear, 1 x 4096 x 151936": partial(linear, 1, 4096, 151936),
    "attention, 64 rows of context 4096": partial(attention, 64, 1, 4096),
    "attention, 1 row of context 32768": partial(attention, 1, 1, 32768),
    "attention, prompt of 8192": partial(attention, 1, 8192, 8192),
}
"""What `measure_kernels` knows, by name: a new kernel is entered here."""


def measure_kernels(
    ops: Ops, ceilings: Ceilings, repeats_ms: int, names: Iterable[str] = CASES
) -> Iterator[KernelTime]:
    """Measure the named cases one after another, each for `repeats_ms`."""
    for name in names:
        case = CASES[name](ops)
        time_us = median(timing.samples_ms(case.work, repeats_ms)) * 1e3
        yield KernelTime(name, time_us, ceilings.seconds(case.num_bytes, case.flops) * 1e6)
