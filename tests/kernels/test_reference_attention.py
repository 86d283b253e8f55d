"""The reference's step inputs and paged attention against loops over rows, queries and heads."""

import math

import pytest
import torch
from torch import Tensor

from omni_async.backend.choose import choose_ops
from omni_async.backend.ops import LayerCache, Rotary, StepInputs
from omni_async.backend.reference.attention import attend, plan_attention
from omni_async.backend.reference.ops import ReferenceOps
from omni_async.backend.reference.rotary import rotate
from omni_async.errors import OptionError
from tests.support.forward import step_rows_of

BLOCK_SIZE = 16
EPSILON = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}

Shape = tuple[int, int]
"""A row: its length in the step, and its context, which includes it."""

MIXES: dict[str, list[Shape]] = {
    "first token": [(1, 1)],
    "one decode row": [(1, 37)],
    "decode rows": [(1, 16), (1, 17), (1, 1), (1, 200)],
    "decode rows of several sizes": [(1, 5), (1, 700), (1, 300), (1, 511), (1, 512)],
    "fresh prompt": [(33, 33)],
    "fresh prompts": [(2, 2), (16, 16), (17, 17)],
    "later chunks": [(5, 21), (16, 32), (2, 100)],
    "mixed": [(1, 9), (20, 20), (1, 300), (7, 50), (1, 1), (3, 3)],
    "long chunk": [(700, 720), (3, 40)],
}


def step_inputs(shapes: list[Shape]) -> tuple[StepInputs, Tensor]:
    """A step whose rows lie in shuffled slots and blocks; also the block tables `[slots, blocks]`."""
    generator = torch.Generator().manual_seed(0)
    num_slots = len(shapes) + 3
    longest = max(context for _, context in shapes)
    per_slot = -(-longest // BLOCK_SIZE)
    tables = (torch.randperm(num_slots * per_slot, generator=generator) + 1).view(num_slots, per_slot).int()
    tokens = torch.randint(1000, (num_slots, longest), generator=generator).int()
    slots = torch.randperm(num_slots, generator=generator)[: len(shapes)].tolist()
    rows = step_rows_of(
        [(slot, context - length, length) for slot, (length, context) in zip(slots, shapes, strict=True)]
    )
    inputs = ReferenceOps().prepare(rows, tokens, tables, BLOCK_SIZE)
    at = 0
    for (length, context), slot in zip(shapes, slots, strict=True):
        for position in range(context - length, context):
            assert inputs.token_ids[at] == tokens[slot, position]
            assert inputs.positions[at] == position
            block = int(tables[slot, position // BLOCK_SIZE])
            assert inputs.attention.slot_mapping[at] == block * BLOCK_SIZE + position % BLOCK_SIZE
            at += 1
    return inputs, tables[slots]


@pytest.mark.parametrize("mix", MIXES)
def test_prepare(mix: str) -> None:
    shapes = MIXES[mix]
    inputs, tables = step_inputs(shapes)
    batch = inputs.attention
    assert batch.query_starts.tolist() == [sum(length for length, _ in shapes[:i]) for i in range(len(shapes) + 1)]
    assert batch.context_lens.tolist() == [context for _, context in shapes]
    assert batch.single == all(length == 1 for length, _ in shapes)
    assert torch.equal(batch.block_tables[batch.slots], tables)
    assert inputs.sampled_slots.tolist() == batch.slots.tolist()
    assert inputs.sampled_lengths.tolist() == [context for _, context in shapes]
    assert inputs.sampled_tokens.tolist() == [end - 1 for end in batch.query_starts[1:].tolist()]


def make_cache(
    shapes: list[Shape], tables: Tensor, num_kv_heads: int, head_size: int, dtype: torch.dtype
) -> LayerCache:
    """Random keys and values within the contexts, NaN wherever nothing is visible, zeros in block 0."""
    parts = []
    for seed in (1, 2):
        shape = (int(tables.max()) + 1, BLOCK_SIZE, num_kv_heads, head_size)
        part = torch.full(shape, torch.nan, dtype=dtype)
        part[0] = 0
        values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
        for row, (_, context) in enumerate(shapes):
            for position in range(context):
                place = int(tables[row, position // BLOCK_SIZE]), position % BLOCK_SIZE
                part[place] = values[place]
        parts.append(part)
    return parts[0], parts[1]


def attend_to(inputs: StepInputs, q: Tensor, cache: LayerCache, scale: float) -> Tensor:
    return attend(q, cache, plan_attention(inputs.attention, BLOCK_SIZE, q.dtype), scale)


def naive(q: Tensor, cache: LayerCache, shapes: list[Shape], tables: Tensor, scale: float) -> Tensor:
    out = torch.zeros(q.shape, dtype=torch.float64)
    group = q.shape[1] // cache[0].shape[2]
    at = 0
    for row, (length, context) in enumerate(shapes):
        places = [(int(tables[row, p // BLOCK_SIZE]), p % BLOCK_SIZE) for p in range(context)]
        keys, values = (torch.stack([part[place] for place in places]).double() for part in cache)
        for query in range(length):
            seen = context - length + query + 1
            for head in range(q.shape[1]):
                scores = keys[:seen, head // group] @ q[at, head].double() * scale
                weights = (scores - scores.max()).exp()
                out[at, head] = weights @ values[:seen, head // group] / weights.sum()
            at += 1
    return out


@pytest.mark.parametrize("dtype", EPSILON, ids=str)
@pytest.mark.parametrize("mix", MIXES)
def test_attend(mix: str, dtype: torch.dtype) -> None:
    shapes = MIXES[mix]
    inputs, tables = step_inputs(shapes)
    num_heads, num_kv_heads, head_size = (2, 1, 8) if mix == "long chunk" else (6, 2, 16)
    cache = make_cache(shapes, tables, num_kv_heads, head_size, dtype)
    before = [part.clone() for part in cache]
    q = torch.randn(len(inputs.positions), num_heads, head_size, generator=torch.Generator().manual_seed(3)).to(dtype)
    scale = 1.7 / math.sqrt(head_size)
    found = attend_to(inputs, q, cache, scale)
    assert found.dtype == dtype
    expected = naive(q, cache, shapes, tables, scale)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=EPSILON[dtype])
    for part, old in zip(cache, before, strict=True):
        assert torch.equal(part.nan_to_num(-77), old.nan_to_num(-77))


@pytest.mark.parametrize("num_kv_heads", [1, 2, 3, 6])
def test_head_groups(num_kv_heads: int) -> None:
    shapes = MIXES["mixed"]
    inputs, tables = step_inputs(shapes)
    cache = make_cache(shapes, tables, num_kv_heads, 16, torch.float32)
    q = torch.randn(len(inputs.positions), 6, 16, generator=torch.Generator().manual_seed(3))
    found = attend_to(inputs, q, cache, 0.25)
    torch.testing.assert_close(found.double(), naive(q, cache, shapes, tables, 0.25), rtol=0, atol=1e-5)


def test_one_batch_serves_all_layers_and_the_next_batch_its_own() -> None:
    ops = ReferenceOps()
    angles = torch.rand(300, 4, generator=torch.Generator().manual_seed(4)) * 6
    rotary = Rotary(angles.cos(), angles.sin(), 8)
    for mix in ("decode rows", "mixed", "decode rows"):
        shapes = MIXES[mix]
        inputs, tables = step_inputs(shapes)
        qkv = torch.randn(len(inputs.positions), 32, generator=torch.Generator().manual_seed(3))
        for _ in range(2):
            cache = make_cache(shapes, tables, 1, 8, torch.float32)
            found = ops.attention(qkv, inputs.positions, rotary, None, cache, inputs.attention, 2, 0.3)
            # The new keys and values are in the cache by now.
            q = rotate(qkv[:, :16].view(-1, 2, 8), inputs.positions, rotary)
            torch.testing.assert_close(found.double(), naive(q, cache, shapes, tables, 0.3), rtol=0, atol=1e-5)


@pytest.mark.parametrize("mix", ["decode rows", "decode rows of several sizes", "mixed"])
def test_undefined_table_entries_are_never_read(mix: str) -> None:
    shapes = MIXES[mix]
    inputs, tables = step_inputs(shapes)
    cache = make_cache(shapes, tables, 1, 8, torch.float32)
    q = torch.randn(len(inputs.positions), 2, 8, generator=torch.Generator().manual_seed(3))
    for row, (_, context) in enumerate(shapes):
        inputs.attention.block_tables[inputs.attention.slots[row], -(-context // BLOCK_SIZE) :] = 10**6
    found = attend_to(inputs, q, cache, 0.3)
    torch.testing.assert_close(found.double(), naive(q, cache, shapes, tables, 0.3), rtol=0, atol=1e-5)


def test_the_triton_backend_is_for_cuda() -> None:
    with pytest.raises(OptionError, match="runs on cuda"):
        choose_ops("triton", torch.device("cpu"))
    assert isinstance(choose_ops("auto", torch.device("cpu")), ReferenceOps)
