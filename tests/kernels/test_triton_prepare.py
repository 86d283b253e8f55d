"""The kernels around a step against the reference: inputs from the tables, appending of drawn tokens, embeddings."""

import pytest
import torch

from omni_async.backend.ops import Sampled, SamplingBatch, StepInputs, StepRows
from omni_async.backend.reference.ops import ReferenceOps
from omni_async.backend.triton import TritonOps
from omni_async.sampling.params import SamplingNeeds
from tests.support.forward import step_rows_of
from tests.support.sampling import Table

# Triton's interpreter makes the bounds of a loop from arrays of one element.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BLOCK_SIZE = 4
SLOTS, LENGTH = 90, 60
# (slot, start, length); the last has more rows than a kernel looks at together.
STEPS = {
    "one token": [(3, 0, 1)],
    "decode": [(5, 7, 1), (0, 59, 1), (2, 0, 1)],
    "prompts": [(1, 0, 17), (4, 8, 2), (0, 3, 40)],
    "mixed": [(9, 31, 1), (1, 0, 33), (2, 4, 1), (3, 20, 3)],
    "many rows": [(slot, slot % 50, 1 + slot % 3) for slot in reversed(range(SLOTS))],
}


def pad(rows: StepRows, more_tokens: int, more_rows: int, more_sampled: int) -> StepRows:
    return StepRows(
        slots=torch.nn.functional.pad(rows.slots, (0, more_rows), value=-1),
        starts=torch.nn.functional.pad(rows.starts, (0, more_rows)),
        query_starts=torch.cat([rows.query_starts, rows.query_starts[-1:].repeat(more_rows)]),
        new_places=torch.nn.functional.pad(rows.new_places, (0, more_rows), value=-1),
        new_blocks=torch.nn.functional.pad(rows.new_blocks, (0, more_rows)),
        sampled=torch.nn.functional.pad(rows.sampled, (0, more_sampled), value=-1),
        num_tokens=rows.num_tokens + more_tokens,
        single=rows.single,
    )


@pytest.mark.parametrize("padding", [(0, 0, 0), (1, 0, 0), (37, 5, 2), (3, 3, 3)])
@pytest.mark.parametrize("step", STEPS)
def test_prepare(step: str, padding: tuple[int, int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1000, (SLOTS, LENGTH), generator=generator).int().to(DEVICE)
    tables = torch.randint(1, 500, (SLOTS, LENGTH // BLOCK_SIZE), generator=generator).int().to(DEVICE)
    exact = step_rows_of(STEPS[step])
    # Every third row gains the block that its last token needs; the table does not know it yet.
    ends = exact.starts + exact.query_starts.diff()
    gains = torch.arange(len(ends)) % 3 == 0
    exact = StepRows(
        *[part.to(DEVICE) for part in (exact.slots, exact.starts, exact.query_starts)],
        new_places=torch.where(gains, (ends - 1) // BLOCK_SIZE, -1).int().to(DEVICE),
        new_blocks=(torch.arange(len(ends)).int() + 1000).to(DEVICE),
        sampled=torch.arange(0, len(STEPS[step]), 2, dtype=torch.int32, device=DEVICE),
        num_tokens=exact.num_tokens,
        single=exact.single,
    )
    wanted_tables = tables.clone()
    wanted = ReferenceOps().prepare(exact, tokens, wanted_tables, BLOCK_SIZE)
    more_tokens, more_rows, more_sampled = padding
    found = TritonOps().prepare(pad(exact, *padding), tokens, tables, BLOCK_SIZE)
    assert found.attention.single == exact.single
    assert found.attention.block_tables is tables
    assert torch.equal(tables, wanted_tables)

    def columns(inputs: StepInputs) -> list[torch.Tensor]:
        batch = inputs.attention
        by_token = [inputs.token_ids, inputs.positions, batch.slot_mapping]
        by_row = [batch.slots, batch.context_lens, batch.query_starts]
        return by_token + by_row + [inputs.sampled_tokens, inputs.sampled_slots, inputs.sampled_lengths]

    fillers = [0, 0, -1, -1, 0, exact.num_tokens, 0, -1, 0]
    counts = [more_tokens] * 3 + [more_rows] * 3 + [more_sampled] * 3
    for ours, theirs, filler, count in zip(columns(found), columns(wanted), fillers, counts, strict=True):
        assert ours.dtype is torch.int64
        assert ours.tolist() == theirs.tolist() + [filler] * count


def test_append_leaves_padding_alone() -> None:
    table = Table(3, 9, DEVICE.type)
    tokens = torch.full((3, 5), 7, dtype=torch.int32, device=DEVICE)
    slots = torch.tensor([2, -1, 0], device=DEVICE)
    lengths = torch.tensor([4, 0, 1], device=DEVICE)
    batch = SamplingBatch(table.tables, tokens, slots, lengths, SamplingNeeds.NONE, -1)
    finite = torch.tensor([True, True, False], device=DEVICE)
    drawn = Sampled(torch.tensor([5, 1, 3], device=DEVICE), finite, None)
    assert TritonOps().append(drawn, batch).tolist() == [5, 1, -1]
    assert tokens.tolist() == [[7, 0, 7, 7, 7], [7] * 5, [7, 7, 7, 7, 5]]


def test_append_of_the_reference() -> None:
    table = Table(3, 9)
    tokens = torch.full((3, 5), 7, dtype=torch.int32)
    batch = SamplingBatch(table.tables, tokens, torch.tensor([2, 0]), torch.tensor([4, 1]), SamplingNeeds.NONE, -1)
    drawn = Sampled(torch.tensor([5, 3]), torch.tensor([True, False]), None)
    assert ReferenceOps().append(drawn, batch).tolist() == [5, -1]
    assert tokens.tolist() == [[7, 0, 7, 7, 7], [7] * 5, [7, 7, 7, 7, 5]]


@pytest.mark.parametrize("size", [1, 96, 1500])
def test_embedding(size: int) -> None:
    weight = torch.randn(50, size, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    ids = torch.tensor([0, 49, 7, 7], device=DEVICE)
    assert torch.equal(TritonOps().embedding(ids, weight), weight[ids])
