"""A request of better priority does not wait for the rest of a long prompt."""

import pytest

from omni_async.scheduler.plan import StepOutput
from omni_async.scheduler.scheduler import Limits, Scheduler
from omni_async.scheduler.sequence import Sequence, StopRule


class Reader:
    def __init__(self, capacity: int = 100) -> None:
        self.capacity = capacity

    def room(self, pending: int) -> int:
        return self.capacity - pending


def make(prompt_len: int, priority: int, arrival: int, capacity: int = 100) -> Sequence:
    stop = StopRule(token_ids=frozenset(), end_ids=frozenset(), max_length=100)
    return Sequence(range(prompt_len), rank=(priority, arrival), stop=stop, outlet=Reader(capacity))


def step(scheduler: Scheduler) -> list[tuple[Sequence, int]]:
    """Run one step; returns its sequences and how many of their tokens it computes."""
    plan = scheduler.plan()
    assert plan is not None
    draws = sum(row.samples for row in plan.rows)
    scheduler.commit(StepOutput(plan, [0] * draws, [True] * draws))
    scheduler.check_integrity()
    return [(row.sequence, row.length) for row in plan.rows]


@pytest.mark.parametrize(("priority", "expected"), [(0, "newcomer"), (1, "prompt")])
def test_a_newcomer_overtakes_the_prompt_of_a_worse_one(priority: int, expected: str) -> None:
    scheduler = Scheduler(Limits(num_slots=2, num_blocks=100, block_size=4, max_step_tokens=8, prefix_caching=False))
    prompt, newcomer = make(80, 1, 0), make(20, priority, 1)
    scheduler.add(prompt)
    assert step(scheduler) == [(prompt, 8)]
    scheduler.add(newcomer)
    first = {"newcomer": newcomer, "prompt": prompt}[expected]
    assert step(scheduler) == [(first, 8)]
    assert step(scheduler) == [(first, 8)]
    if first is newcomer:
        assert step(scheduler) == [(newcomer, 4), (prompt, 4)]
        assert step(scheduler) == [(newcomer, 1), (prompt, 7)]
    assert scheduler.num_preemptions == 0


def test_a_newcomer_whom_nobody_reads_holds_nobody_up() -> None:
    scheduler = Scheduler(Limits(num_slots=2, num_blocks=100, block_size=4, max_step_tokens=8, prefix_caching=False))
    prompt, unread = make(80, 1, 0), make(20, 0, 1, capacity=0)
    scheduler.add(prompt)
    scheduler.add(unread)
    assert [step(scheduler) for _ in range(3)] == [[(prompt, 8)]] * 3
