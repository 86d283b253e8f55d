"""A prompt that is displaced while it is computed is scored whole, though its second chunks are not its first."""

import numpy as np

from omni_async.sampling.logprobs import HostLogprobs
from omni_async.scheduler.plan import StepOutput, StepPlan
from omni_async.scheduler.scheduler import Limits, Scheduler
from omni_async.scheduler.sequence import Sequence, StopRule


class Open:
    """An outlet whose reader keeps up."""

    def room(self, pending: int) -> int:
        return 100


def make(prompt_len: int, priority: int, arrival: int, num_prompt_logprobs: int = -1) -> Sequence:
    stop = StopRule(token_ids=frozenset(), end_ids=frozenset(), max_length=60)
    prompt = range(prompt_len)
    rank = (priority, arrival)
    return Sequence(prompt, rank=rank, stop=stop, outlet=Open(), num_prompt_logprobs=num_prompt_logprobs)


def compute(plan: StepPlan) -> StepOutput:
    """What a runner returns, with the position of each scored token as its log-probability."""
    scored: dict[int, HostLogprobs] = {}
    for index, row in enumerate(plan.rows):
        end = min(row.start + row.length, row.sequence.prompt_len - 1)
        if row.sequence.num_prompt_logprobs >= 0 and end > row.start:
            at = np.arange(row.start + 1, end + 1)
            best = np.stack([at, at], axis=1)
            scored[index] = HostLogprobs(at.astype(np.float32), at, best, best.astype(np.float32))
    draws = sum(row.samples for row in plan.rows)
    return StepOutput(plan, [0] * draws, [True] * draws, prompt_logprobs=scored)


def step(scheduler: Scheduler) -> list[tuple[int, int]]:
    """Run one step; returns the start and the length of each row."""
    plan = scheduler.plan()
    assert plan is not None
    scheduler.commit(compute(plan))
    return [(row.start, row.length) for row in plan.rows]


def test_other_chunks_after_a_displacement() -> None:
    limits = Limits(num_slots=2, num_blocks=40, block_size=4, max_step_tokens=8, prefix_caching=False)
    scheduler = Scheduler(limits)
    neighbour, displacer = make(1, 0, 0), make(1, 0, 2)
    scored = make(30, 1, 1, num_prompt_logprobs=2)
    scheduler.add(neighbour)
    scheduler.add(scored)
    step(scheduler)
    assert step(scheduler) == [(1, 1), (7, 7)]
    scheduler.add(displacer)
    step(scheduler)
    assert scheduler.num_preemptions == 1
    scheduler.end(neighbour)
    scheduler.end(displacer)
    assert [step(scheduler) for _ in range(4)] == [[(0, 8)], [(8, 8)], [(16, 8)], [(24, 6)]]
    kept = scored.prompt_logprobs
    positions = list(range(1, 30))
    assert np.concatenate([chunk.chosen for chunk in kept]).tolist() == positions
    assert np.concatenate([chunk.rank for chunk in kept]).tolist() == positions
    for values in (np.concatenate([c.top_ids for c in kept]), np.concatenate([c.top for c in kept])):
        assert values.tolist() == [[p, p] for p in positions]
