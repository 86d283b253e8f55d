"""Paged attention against a dense softmax in float32: on a CUDA device if there is one, else in Triton's interpreter.

Scratch and outputs hold NaN (the largest integer) before each call, as does every cache entry that no row may see; the
interpreter multiplies bfloat16 wrongly, so that is for the device.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from omni_async_kernels.attention_tiles import max_splits
from omni_async_kernels.attention_work import AttentionWork, plan_attention
from omni_async_kernels.paged_attention import paged_attention
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]
FP8 = torch.float8_e4m3fn

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=[str(dtype).removeprefix("torch.") for dtype in DTYPES])
on_the_device = pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter would take minutes, or cannot")

# Triton's interpreter makes the bounds of a loop from arrays of one element.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")

Rows = list[tuple[int, int]]
"""Tokens and context of each row."""


@pytest.fixture(autouse=True)
def uninitialised_memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


@dataclass(frozen=True)
class Heads:
    num_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int = 16


SMALL = Heads(4, 2, 16)


@dataclass(frozen=True)
class Step:
    """Rows in shuffled slots, padded to a number of rows and tokens."""

    rows: Rows
    slots: Tensor
    query_starts: Tensor
    context_lens: Tensor
    block_tables: Tensor
    num_blocks: int
    num_tokens: int
    heads: Heads

    @classmethod
    def of(
        cls, rows: Rows, heads: Heads, *, padding_rows: int = 0, padding_tokens: int = 0, max_context: int = 0
    ) -> "Step":
        generator = torch.Generator().manual_seed(len(rows))
        num_slots = len(rows) + 2
        per_row = -(-max([max_context] + [context for _, context in rows]) // heads.block_size) + 1
        num_blocks = 1 + sum(-(-context // heads.block_size) for _, context in rows)
        free = torch.randperm(num_blocks - 1, generator=generator) + 1
        slots = torch.randperm(num_slots, generator=generator)[: len(rows)]
        tables = torch.full((num_slots, per_row), 2**31 - 1, dtype=torch.int32)
        for slot, (_, context) in zip(slots.tolist(), rows, strict=True):
            count = -(-context // heads.block_size)
            tables[slot, :count], free = free[:count], free[count:]
        ends = torch.tensor([length for length, _ in rows] + [0] * padding_rows).cumsum(0)
        contexts = torch.tensor([context for _, context in rows] + [0] * padding_rows)
        return cls(
            rows=rows,
            slots=torch.cat([slots, torch.full((padding_rows,), -1)]).to(DEVICE),
            query_starts=torch.nn.functional.pad(ends, (1, 0)).to(DEVICE),
            context_lens=contexts.to(DEVICE),
            block_tables=tables.to(DEVICE),
            num_blocks=num_blocks,
            num_tokens=int(ends[-1]) + padding_tokens,
            heads=heads,
        )

    def plan(self, dtype: torch.dtype, window: int | None = None) -> AttentionWork:
        return plan_attention(
            self.slots,
            self.query_starts,
            self.context_lens,
            self.num_tokens,
            num_heads=self.heads.num_heads,
            num_kv_heads=self.heads.num_kv_heads,
            head_size=self.heads.head_size,
            dtype=dtype,
            single=all(length == 1 for length, _ in self.rows),
            window=window,
        )

    def queries(self, dtype: torch.dtype, seed: int = 0) -> Tensor:
        return random(self.num_tokens, self.heads.num_heads, self.heads.head_size, seed=seed).to(dtype)

    def cache(self, dtype: torch.dtype, seed: int = 0, window: int | None = None) -> tuple[Tensor, Tensor]:
        """Random keys and values where a row may look, else NaN."""
        heads = self.heads
        visible = torch.zeros(self.num_blocks * heads.block_size, dtype=torch.bool, device=DEVICE)
        for row, (length, context) in enumerate(self.rows):
            first = 0 if window is None else max(0, context - length - window + 1)
            visible[self.places(row)[first:]] = True
        shape = (self.num_blocks, heads.block_size, heads.num_kv_heads, heads.head_size)
        keys, values = (
            random(*shape, seed=seed + part).flatten(0, 1).where(visible[:, None, None], torch.nan).view(shape)
            for part in (1, 2)
        )
        return keys.to(dtype), values.to(dtype)

    def places(self, row: int) -> Tensor:
        """Where in the cache a row's positions are."""
        position = torch.arange(self.rows[row][1], device=DEVICE)
        blocks = self.block_tables[self.slots[row]][position // self.heads.block_size]
        return blocks.long() * self.heads.block_size + position % self.heads.block_size

    def expected(
        self,
        q: Tensor,
        cache: tuple[Tensor, Tensor],
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
    ) -> Tensor:
        """The definition, row by row: of all tokens but padding, in float32."""
        group = self.heads.num_heads // self.heads.num_kv_heads
        results, first = [], 0
        for row, (length, context) in enumerate(self.rows):
            places = self.places(row)
            key, value = (
                part.flatten(0, 1).float()[places].repeat_interleave(group, dim=1).nan_to_num() for part in cache
            )
            scores = torch.einsum("qhd,khd->hqk", q[first : first + length].float(), key) * scale
            if soft_cap is not None:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            at = torch.arange(context - length, context, device=DEVICE)[:, None]
            other = torch.arange(context, device=DEVICE)
            hidden = other > at if window is None else (other > at) | (other <= at - window)
            weight = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            results.append(torch.einsum("hqk,khd->qhd", weight, value))
            first += length
        return torch.cat(results)


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(DEVICE)


def check(ours: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Relative to the size of the values; rows beyond the expected ones are padding."""
    assert ours.dtype is dtype
    ours = ours[: len(expected)].float()
    assert ours.isfinite().all()
    assert (ours - expected).norm() / expected.norm() < TOLERANCE[dtype]
    assert (ours - expected).abs().max() < 40 * TOLERANCE[dtype]


def attend_and_check(
    step: Step, dtype: torch.dtype, window: int | None = None, soft_cap: float | None = None, scale: float | None = None
) -> None:
    scale = step.heads.head_size**-0.5 if scale is None else scale
    q, cache = step.queries(dtype), step.cache(dtype, window=window)
    ours = paged_attention(
        q, *cache, step.block_tables, scale, step.plan(dtype, window), window=window, soft_cap=soft_cap
    )
    check(ours, step.expected(q, cache, scale, window, soft_cap), dtype)


ROWS: dict[str, Rows] = {
    "one token": [(1, 1)],
    "decode": [(1, 5), (1, 64), (1, 1), (1, 130)],
    "decode, several splits": [(1, 513), (1, 256), (1, 257), (1, 3)],
    "drafts": [(2, 2), (5, 300), (8, 70), (1, 9)],
    "prompts": [(17, 17), (9, 9), (70, 70)],
    "chunks of prompts": [(12, 40), (33, 100), (16, 16)],
    "everything": [(1, 300), (40, 90), (1, 1), (3, 3), (1, 17), (4, 520)],
}
HEADS = [SMALL, Heads(9, 3, 64), Heads(4, 4, 96, 32)]
if DEVICE == "cuda":
    HEADS += [Heads(8, 1, 128, 64), Heads(2, 1, 256), Heads(32, 8, 128), Heads(12, 12, 80), Heads(16, 1, 128)]


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("heads", HEADS[: None if DEVICE == "cuda" else 1], ids=str)
@every_dtype
def test_rows(rows: Rows, heads: Heads, dtype: torch.dtype) -> None:
    attend_and_check(Step.of(rows, heads), dtype)


@pytest.mark.parametrize("tokens", [1, 5])
@on_the_device
@every_dtype
def test_many_rows_are_the_same_in_every_run(tokens: int, dtype: torch.dtype) -> None:
    rows = [(tokens, tokens + row * 37 % 3000) for row in range(150)] + [(1, 20000), (1, 5000)]
    step = Step.of(rows, Heads(32, 8, 128))
    q, cache, work = step.queries(dtype), step.cache(dtype), step.plan(dtype)
    first = paged_attention(q, *cache, step.block_tables, 0.1, work)
    check(first, step.expected(q, cache, 0.1), dtype)
    for _ in range(20):
        assert torch.equal(paged_attention(q, *cache, step.block_tables, 0.1, work), first)


@pytest.mark.parametrize("window", [1, 20, 300, 1000])
@every_dtype
def test_window_hides_older_positions_and_never_reads_them(window: int, dtype: torch.dtype) -> None:
    rows = [(1, 400), (1, 5), (3, 290), (45, 45), (30, 340), (1, 20), (8, 700)]
    attend_and_check(Step.of(rows, SMALL), dtype, window=window)


@every_dtype
def test_work_for_a_window_serves_smaller_ones_only(dtype: torch.dtype) -> None:
    step = Step.of([(1, 700), (4, 900), (20, 300)], SMALL)
    q, cache = step.queries(dtype), step.cache(dtype)
    for planned, window in [(None, 40), (600, 40), (600, 600)]:
        ours = paged_attention(q, *cache, step.block_tables, 0.25, step.plan(dtype, planned), window=window)
        check(ours, step.expected(q, cache, 0.25, window), dtype)
    for window in (601, None):
        with pytest.raises(ValueError, match="window"):
            paged_attention(q, *cache, step.block_tables, 0.25, step.plan(dtype, 600), window=window)


@pytest.mark.parametrize("window", [None, 30])
@every_dtype
def test_soft_cap_bends_large_scores(window: int | None, dtype: torch.dtype) -> None:
    # Scores far beyond the cap: without it the softmax would be another one.
    step = Step.of([(1, 300), (2, 40), (20, 60)], SMALL)
    attend_and_check(step, dtype, window, soft_cap=3.0, scale=2.0)
    q, cache = step.queries(dtype), step.cache(dtype)
    capped, free = step.expected(q, cache, 2.0, soft_cap=3.0), step.expected(q, cache, 2.0)
    assert (capped - free).norm() / free.norm() > 0.1


@every_dtype
def test_large_scores_do_not_overflow(dtype: torch.dtype) -> None:
    attend_and_check(Step.of([(1, 600), (2, 40), (20, 60)], SMALL), dtype, scale=30.0)


@pytest.mark.parametrize("heads", HEADS[: None if DEVICE == "cuda" else 1], ids=str)
@every_dtype
def test_eight_bit_cache(heads: Heads, dtype: torch.dtype) -> None:
    if dtype is torch.float32 and heads != SMALL:
        pytest.skip("takes long to compile, and nobody runs float32 with such a cache")
    step = Step.of([(1, 1300), (1, 5), (8, 300), (40, 90), (1, 64)], heads)
    q, cache = step.queries(dtype), step.cache(FP8)
    k_scale, v_scale, scale = 0.5, 2.0, heads.head_size**-0.5
    ours = paged_attention(q, *cache, step.block_tables, scale, step.plan(dtype), k_scale=k_scale, v_scale=v_scale)
    check(ours, step.expected(q, (cache[0].float() * k_scale, cache[1].float() * v_scale), scale), dtype)


@pytest.mark.parametrize("rows", [[(1, 70), (1, 300)], [(1, 70), (3, 300), (30, 31)]], ids=["single", "mixed"])
@every_dtype
def test_padding_changes_nothing(rows: Rows, dtype: torch.dtype) -> None:
    step = Step.of(rows, SMALL, padding_rows=3, padding_tokens=7)
    attend_and_check(step, dtype)
    q, cache = step.queries(dtype), step.cache(dtype)
    real = int(step.query_starts[-1])
    # More rows and tokens, as many splits: bit for bit the same.
    alone = Step.of(rows, SMALL)
    single = all(length == 1 for length, _ in rows)
    assert max_splits(len(rows), 2, single=single) != max_splits(len(rows) + 3, 2, single=single)
    padded = paged_attention(q, *cache, step.block_tables, 0.25, step.plan(dtype))[:real]
    ours = paged_attention(q[:real], *cache, alone.block_tables, 0.25, alone.plan(dtype))
    assert torch.equal(padded, ours)


@every_dtype
def test_only_padding_is_no_work(dtype: torch.dtype) -> None:
    step = Step.of([(1, 1)], SMALL, padding_rows=2, padding_tokens=15)
    step.query_starts.zero_()
    step.context_lens.zero_()
    work = step.plan(dtype)
    assert work.counts.tolist() == [0, 0]
    assert paged_attention(step.queries(dtype), *step.cache(dtype), step.block_tables, 1.0, work).isnan().all()


@every_dtype
def test_one_work_serves_all_layers(dtype: torch.dtype) -> None:
    step = Step.of([(1, 600), (3, 300), (20, 30)], SMALL)
    work = step.plan(dtype)
    for layer in range(2):
        q, cache = step.queries(dtype, seed=layer), step.cache(dtype, seed=10 * layer)
        ours = paged_attention(q, *cache, step.block_tables, 0.25, work)
        check(ours, step.expected(q, cache, 0.25), dtype)
        arrived = work.arrived[: int(work.counts[0])]
        split = work.splits[: len(arrived), 6]
        assert arrived[split == 0].eq(0).all()


@every_dtype
def test_a_row_does_not_depend_on_its_neighbours(dtype: torch.dtype) -> None:
    rows = [(1, 600), (3, 300), (20, 40)]
    step = Step.of(rows, SMALL)
    q, cache = step.queries(dtype), step.cache(dtype)
    together = paged_attention(q, *cache, step.block_tables, 0.25, step.plan(dtype))
    for row, (length, context) in enumerate(rows):
        first = int(step.query_starts[row])
        # Alone, among as many rows: the others are padding.
        starts = torch.full((len(rows) + 1,), length, device=DEVICE)
        starts[0] = 0
        contexts = torch.zeros(len(rows), dtype=torch.int64, device=DEVICE)
        contexts[0] = context
        work = plan_attention(
            step.slots.roll(-row), starts, contexts, step.num_tokens, num_heads=4, num_kv_heads=2, head_size=16,
            dtype=dtype, single=False,
        )  # fmt: skip
        alone = paged_attention(q.roll(-first, 0), *cache, step.block_tables, 0.25, work)
        assert torch.equal(alone[:length], together[first : first + length])


def launch_shapes(work: AttentionWork) -> list[torch.Size]:
    return [part.shape for part in (work.splits, work.tiles, work.arrived, work.parts, work.part_lse)]


BATCHES: list[Rows] = [
    [(1, 600), (1, 257), (1, 3)],
    [(1, 1), (1, 2), (1, 700)],
    [(8, 20), (1, 650), (24, 24)],
    [(30, 500), (2, 2), (1, 1)],
]


@every_dtype
def test_launches_depend_on_shapes_alone(dtype: torch.dtype) -> None:
    steps = [Step.of(rows, SMALL, padding_tokens=33 - sum(length for length, _ in rows)) for rows in BATCHES]
    plans = [
        plan_attention(
            step.slots, step.query_starts, step.context_lens, 33, num_heads=4, num_kv_heads=2, head_size=16,
            dtype=dtype, single=False,
        )
        for step in steps
    ]  # fmt: skip
    for step, work in zip(steps, plans, strict=True):
        assert launch_shapes(work) == launch_shapes(plans[0])
        q, cache = step.queries(dtype), step.cache(dtype)
        ours = paged_attention(q, *cache, step.block_tables, 0.25, work)
        check(ours, step.expected(q, cache, 0.25), dtype)


@pytest.mark.parametrize("batches", [BATCHES[:2], BATCHES], ids=["single", "mixed"])
@on_the_device
@every_dtype
def test_one_captured_graph_serves_every_batch(batches: list[Rows], dtype: torch.dtype) -> None:
    heads = Heads(32, 8, 128)
    steps = [
        Step.of(rows, heads, padding_tokens=33 - sum(length for length, _ in rows), max_context=700) for rows in batches
    ]
    most_blocks = max(step.num_blocks for step in steps)
    inputs = [
        (
            step.slots, step.query_starts, step.context_lens, step.block_tables, step.queries(dtype),
            *(torch.nn.functional.pad(part, (0, 0) * 3 + (0, most_blocks - len(part))) for part in step.cache(dtype)),
        )
        for step in steps
    ]  # fmt: skip
    slots, starts, contexts, tables, q, *cache = (part.clone() for part in inputs[0])
    single = batches == BATCHES[:2]

    def layers() -> list[Tensor]:
        work = plan_attention(
            slots, starts, contexts, 33, num_heads=32, num_kv_heads=8, head_size=128, dtype=dtype, single=single
        )
        return [paged_attention(q, *cache, tables, 0.1, work) for _ in range(2)]

    layers()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = layers()
    for step, values in [*zip(steps, inputs, strict=True)] * 2:
        for static, value in zip((slots, starts, contexts, tables, q, *cache), values, strict=True):
            static.copy_(value)
        graph.replay()
        expected = step.expected(q, (cache[0], cache[1]), 0.1)
        for result in results:
            check(result, expected, dtype)
        assert torch.equal(results[0][: len(expected)], results[1][: len(expected)])
