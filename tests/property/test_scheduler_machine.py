"""Whatever the order of submitting, planning, committing, failing and cancelling: nothing leaks or is mixed up."""

from collections import deque

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule

from omni_async.errors import StepFailed
from omni_async.scheduler.plan import StepOutput
from omni_async.scheduler.prefix import block_digests
from omni_async.scheduler.scheduler import Limits, Scheduler
from omni_async.scheduler.sequence import Sequence, State, StopRule
from tests.support.device_model import VOCAB, DeviceModel, alone


class Reader:
    """An outlet whose reader may stop reading."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.produced = 0
        self.taken = 0

    def room(self, pending: int) -> int:
        return self.capacity - (self.produced - self.taken) - pending


class SchedulerMachine(RuleBasedStateMachine):
    sequences = Bundle("sequences")

    @initialize(
        slots=st.integers(1, 4),
        block_size=st.sampled_from([1, 2, 4]),
        spare_blocks=st.integers(0, 8),
        max_step=st.integers(4, 12),
        caching=st.booleans(),
        depth=st.integers(1, 3),
    )
    def start(self, slots: int, block_size: int, spare_blocks: int, max_step: int, caching: bool, depth: int) -> None:
        self.max_len = 24
        num_blocks = -(-self.max_len // block_size) + spare_blocks
        self.scheduler = Scheduler(
            Limits(
                num_slots=slots,
                num_blocks=num_blocks,
                block_size=block_size,
                max_step_tokens=max_step,
                prefix_caching=caching,
            )
        )
        self.device = DeviceModel(block_size)
        self.depth = depth
        self.flying: deque[StepOutput] = deque()
        self.arrivals = 0
        self.readers: dict[Sequence, Reader] = {}
        self.expected: dict[Sequence, list[int]] = {}
        self.got: dict[Sequence, list[int]] = {}
        self.ended: dict[Sequence, str] = {}

    @rule(
        target=sequences,
        # Few different tokens, so that prefixes are often shared.
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=16),
        max_tokens=st.integers(1, 12),
        priority=st.integers(0, 2),
        stop=st.sets(st.integers(0, VOCAB - 1), max_size=1),
        capacity=st.integers(1, 6),
    )
    def submit(self, prompt: list[int], max_tokens: int, priority: int, stop: set[int], capacity: int) -> Sequence:
        limits = self.scheduler.limits
        reader = Reader(capacity)
        sequence = Sequence(
            prompt,
            rank=(priority, self.arrivals),
            stop=StopRule(token_ids=frozenset(stop), end_ids=frozenset(), max_length=len(prompt) + max_tokens)
            if len(prompt) + max_tokens <= self.max_len
            else StopRule(token_ids=frozenset(stop), end_ids=frozenset(), max_length=self.max_len),
            outlet=reader,
            block_hashes=block_digests(prompt, limits.block_size) if limits.prefix_caching else [],
        )
        self.arrivals += 1
        expected = alone(prompt, sequence.stop.max_length - len(prompt))
        for i, token in enumerate(expected):
            if token in stop:
                expected = expected[: i + 1]
                break
        self.readers[sequence] = reader
        self.expected[sequence] = expected
        self.got[sequence] = []
        self.scheduler.add(sequence)
        return sequence

    @precondition(lambda self: len(self.flying) < self.depth)
    @rule()
    def plan(self) -> None:
        plan = self.scheduler.plan()
        if plan is not None:
            self.flying.append(self.device.run(plan))

    @precondition(lambda self: len(self.flying) < self.depth)
    @rule()
    def plan_a_step_that_fails(self) -> None:
        plan = self.scheduler.plan()
        if plan is not None:
            # The steps after a failed one read tokens that were never drawn: the device must not notice.
            self.flying.append(StepOutput(plan, [], [], error=ValueError("planted")))
            self.drain()

    def drain(self) -> None:
        while self.flying:
            self.commit()

    @precondition(lambda self: self.flying)
    @rule()
    def commit(self) -> None:
        output = self.flying.popleft()
        for update in self.scheduler.commit(output):
            sequence = update.sequence
            assert sequence not in self.ended, "something came after the end"
            if update.error is not None:
                assert isinstance(update.error, StepFailed)
                self.ended[sequence] = "error"
                continue
            self.readers[sequence].produced += 1
            self.got[sequence].append(update.token_id)
            if update.reason is not None:
                self.ended[sequence] = update.reason

    @rule(sequence=sequences)
    def cancel(self, sequence: Sequence) -> None:
        self.scheduler.end(sequence)
        self.ended.setdefault(sequence, "cancelled")

    @rule(sequence=sequences)
    def read(self, sequence: Sequence) -> None:
        self.readers[sequence].taken = self.readers[sequence].produced

    @invariant()
    def is_sound(self) -> None:
        self.scheduler.check_integrity()
        for sequence, got in self.got.items():
            assert got == self.expected[sequence][: len(got)]
            assert self.readers[sequence].produced - self.readers[sequence].taken <= self.readers[sequence].capacity

    def teardown(self) -> None:
        for _ in range(5000):
            for reader in self.readers.values():
                reader.taken = reader.produced
            plan = self.scheduler.plan() if len(self.flying) < self.depth else None
            if plan is not None:
                self.flying.append(self.device.run(plan))
            elif self.flying:
                self.commit()
            else:
                break
            self.is_sound()
        scheduler = self.scheduler
        assert not scheduler.waiting
        assert not scheduler.running
        assert not scheduler.leaving
        assert scheduler.slots_used == 0
        assert scheduler.pool.num_free == scheduler.limits.num_blocks
        assert set(self.ended) == set(self.got), "a sequence never ended"
        for sequence, reason in self.ended.items():
            assert sequence.state is State.ENDED
            if reason in ("stop", "length"):
                assert self.got[sequence] == self.expected[sequence]


SchedulerMachine.TestCase.settings = settings(
    max_examples=300, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestScheduler = SchedulerMachine.TestCase
