"""Rows of a plan as one array, and the shapes that steps are captured in."""

from array import array

import pytest
import torch

from omni_async.runner.runner import split_gained
from omni_async.runner.step_shape import Buckets, StepShape
from omni_async.sampling.params import SamplingNeeds
from omni_async.scheduler.plan import Admission, NewBlocks, Phase, Row, StepPlan
from omni_async.scheduler.sequence import Sequence, StopRule


class Unlimited:
    def room(self, pending: int) -> int:
        return 1 << 30


def row(slot: int, start: int, length: int, *, samples: bool) -> Row:
    stop = StopRule(token_ids=frozenset(), end_ids=frozenset(), max_length=9)
    sequence = Sequence(array("i", [1]), rank=(0,), stop=stop, outlet=Unlimited())
    return Row(sequence, slot, start, length, Phase.PREFILL, samples)


def test_rows_are_packed_and_padded() -> None:
    rows = [row(7, 0, 4, samples=False), row(2, 9, 1, samples=True), row(3, 5, 2, samples=True)]
    shape = StepShape(num_tokens=16, num_rows=5, num_sampled=4, single=False)
    packed = shape.pack(rows, {2: (4, 77)})
    assert len(packed) == shape.packed_size
    made = shape.unpack(torch.from_numpy(packed))
    assert made.slots.tolist() == [7, 2, 3, -1, -1]
    assert made.starts.tolist() == [0, 9, 5, 0, 0]
    assert made.query_starts.tolist() == [0, 4, 5, 7, 7, 7]
    assert made.new_places.tolist() == [-1, 4, -1, -1, -1]
    assert made.new_blocks[1] == 77
    assert made.sampled.tolist() == [1, 2, -1, -1]
    assert (made.num_tokens, made.single) == (16, False)


def test_a_step_of_padding() -> None:
    shape = StepShape(num_tokens=4, num_rows=2, num_sampled=1, single=True)
    made = shape.unpack(torch.from_numpy(shape.pack([])))
    assert made.slots.tolist() == [-1, -1]
    assert made.query_starts.tolist() == [0, 0, 0]
    assert made.sampled.tolist() == [-1]


@pytest.mark.parametrize(("max_tokens", "max_rows"), [(1, 1), (8, 8), (64, 3), (512, 32), (2048, 256), (1000, 100)])
def test_every_step_finds_the_smallest_shape_that_holds_it(max_tokens: int, max_rows: int) -> None:
    buckets = Buckets(max_tokens, max_rows)
    assert buckets.shapes == sorted(buckets.shapes, key=lambda s: (s.num_tokens, s.num_sampled, s.single), reverse=True)
    assert len(set(buckets.shapes)) == len(buckets.shapes) < 64
    for num_tokens in range(1, max_tokens + 1):
        for num_rows in {1, min(num_tokens, max_rows), min(num_tokens, max_rows, 5)}:
            for num_sampled in {0, 1, num_rows}:
                shape = buckets.find(num_tokens, num_rows, num_sampled)
                assert shape in buckets.shapes
                assert shape is not None
                assert shape.single == (num_tokens == num_rows)
                holding = [
                    s
                    for s in buckets.shapes
                    if s.single == shape.single
                    and s.num_tokens >= num_tokens
                    and s.num_rows >= num_rows
                    and s.num_sampled >= num_sampled
                ]
                assert shape == holding[-1]
                assert num_tokens < 16 or shape.num_tokens < 1.6 * num_tokens


def test_larger_steps_have_no_shape() -> None:
    buckets = Buckets(64, 8)
    assert buckets.find(65, 2, 1) is None
    assert buckets.find(9, 9, 9) is None


def test_only_single_blocks_of_running_slots_travel_with_the_rows() -> None:
    admission = Admission(4, row(4, 0, 3, samples=True).sequence, array("i", [1, 2, 3]))
    new_blocks = (NewBlocks(4, 0, (9,)), NewBlocks(7, 2, (5,)), NewBlocks(6, 1, (3, 8)))
    plan = StepPlan(1, (), 0, (admission,), new_blocks, SamplingNeeds.NONE, -1)
    assert split_gained(plan) == ({7: (2, 5)}, [new_blocks[0], new_blocks[2]])
