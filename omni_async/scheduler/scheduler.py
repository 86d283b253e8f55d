"""Decides what runs in each step: admit, plan, commit. No torch, no clock, no threads."""

from bisect import insort
from dataclasses import dataclass

from omni_async.errors import NonFiniteLogits, StepFailed
from omni_async.sampling.params import SamplingNeeds
from omni_async.scheduler.blocks import BlockPool
from omni_async.scheduler.plan import (
    Admission,
    NewBlocks,
    Phase,
    Row,
    StepOutput,
    StepPlan,
    Update,
    quick_row,
    quick_update,
)
from omni_async.scheduler.prefix import ROOT, block_digest
from omni_async.scheduler.sequence import Sequence, State
from omni_async.types import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The sizes that a scheduler works within."""

    num_slots: int
    num_blocks: int
    block_size: int
    max_step_tokens: int
    prefix_caching: bool


DECODE = Phase.DECODE
RUNNING = State.RUNNING
ENDED = State.ENDED


def _rank(sequence: Sequence) -> tuple[int, ...]:
    return sequence.rank


class Scheduler:
    """Continuous batching with chunked prefill, prefix sharing, and preemption by recomputation.

    Several plans may be under way at once; they commit in the order of their making. A slot and its blocks
    return at the commit of the last plan that names their sequence, so that no plan ever reads another's data.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.pool = BlockPool(limits.num_blocks)
        self.waiting: list[Sequence] = []
        """By rank."""
        self.running: list[Sequence] = []
        """By rank."""
        self.leaving: set[Sequence] = set()
        """Preempted or ended while a plan names them: they still own a slot and blocks."""
        self.num_preemptions = 0
        self.num_steps = 0
        self._free_slots = list(range(limits.num_slots - 1, -1, -1))

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence whose longest possible length fits the pool."""
        insort(self.waiting, sequence, key=_rank)

    def end(self, sequence: Sequence) -> None:
        """Never plan this sequence again and give back what it owns as soon as no plan names it."""
        if sequence.state is State.ENDED:
            return
        if sequence.state is State.WAITING:
            self.waiting.remove(sequence)
        elif sequence.state is State.RUNNING:
            self.running.remove(sequence)
        sequence.state = State.ENDED
        self._leave(sequence)

    @property
    def slots_used(self) -> int:
        """Slots that a sequence owns."""
        return self.limits.num_slots - len(self._free_slots)

    # -- planning ------------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """Choose the rows of the next step, or `None` when nothing can run now."""
        budget = self.limits.max_step_tokens
        rows: list[Row] = []
        new_blocks: list[NewBlocks] = []
        admissions: list[Admission] = []
        # One token of the budget is kept for each decoding sequence, so that long prompts never stall the others.
        reserved = sum([s.num_planned >= s.admission_len for s in self.running])
        size = self.limits.block_size
        for sequence in self.running.copy():
            if sequence.state is not RUNNING:  # displaced by a better one in this very loop
                continue
            start = sequence.num_planned
            if start < sequence.admission_len:
                if self._is_outranked(sequence):
                    continue
                row = self._row(sequence, budget - reserved, new_blocks)
            else:
                reserved -= 1
                total = len(sequence.tokens) + sequence.num_pending
                if (
                    start + 1 == total < sequence.stop.max_length
                    and sequence.credit > 0
                    and start < len(sequence.blocks) * size
                    and budget > 0
                ):  # what `_row` comes to for nearly every row of nearly every step
                    sequence.num_in_flight += 1
                    sequence.num_planned = total
                    sequence.num_pending += 1
                    sequence.credit -= 1
                    budget -= 1
                    rows.append(quick_row((sequence, sequence.slot, start, 1, DECODE, True)))
                    continue
                row = self._row(sequence, budget, new_blocks)
            if row is not None:
                rows.append(row)
                budget -= row.length
        for sequence in self.waiting.copy():
            if budget <= 0:
                break
            if self._must_wait(sequence):
                continue
            if not self._admit(sequence, admissions, new_blocks):
                break
            row = self._row(sequence, budget, new_blocks)
            if row is not None:
                rows.append(row)
                budget -= row.length
        if not rows:
            return None
        return self._step(rows, admissions, new_blocks)

    def _step(self, rows: list[Row], admissions: list[Admission], new_blocks: list[NewBlocks]) -> StepPlan:
        needs = 0
        num_logprobs = -1
        num_tokens = 0
        for row in rows:
            num_tokens += row.length
            if row.samples:
                sequence = row.sequence
                needs |= sequence.needs
                if sequence.num_logprobs > num_logprobs:
                    num_logprobs = sequence.num_logprobs
        self.num_steps += 1
        return StepPlan(
            step_id=self.num_steps,
            rows=tuple(rows),
            num_tokens=num_tokens,
            admissions=tuple(admissions),
            new_blocks=tuple(new_blocks),
            needs=SamplingNeeds(needs),
            num_logprobs=num_logprobs,
        )

    def _row(self, sequence: Sequence, room: int, new_blocks: list[NewBlocks]) -> Row | None:
        """The next row of a running sequence within `room` tokens; its blocks are found or made free."""
        start = sequence.num_planned
        total = len(sequence.tokens) + sequence.num_pending
        length = min(total - start, room)
        if length <= 0:
            return None
        samples = start + length == total
        if samples and (total >= sequence.stop.max_length or (sequence.credit <= 0 and not sequence.has_credit())):
            if start + 1 >= total:
                return None  # nothing but the draw was left to do
            length -= 1
            samples = False
        missing = (start + length - 1) // self.limits.block_size + 1 - len(sequence.blocks)
        if missing > 0:
            if not self._make_room(missing, sequence):
                return None
            blocks = self.pool.allocate(missing)
            new_blocks.append(NewBlocks(sequence.slot, len(sequence.blocks), tuple(blocks)))
            sequence.blocks.extend(blocks)
        # Counted at once: should a later row displace this sequence, its blocks stay until this plan commits.
        sequence.num_in_flight += 1
        sequence.num_planned += length
        if samples:
            sequence.num_pending += 1
            sequence.credit -= 1
        phase = Phase.PREFILL if start < sequence.admission_len else Phase.DECODE
        return Row(sequence, sequence.slot, start, length, phase, samples)

    def _must_wait(self, sequence: Sequence) -> bool:
        """A waiting sequence that others may overtake: nobody takes its tokens, or its prompt is being computed."""
        leader = sequence.leader
        if leader is not None:
            if leader.state is not State.ENDED and leader.num_computed < leader.prompt_len:
                return True
            sequence.leader = None
        return not sequence.has_credit()

    def _is_outranked(self, sequence: Sequence) -> bool:
        """Whether one of better priority waits: it is to be computed before what is left of this one's prompt."""
        for other in self.waiting:
            if other.rank[0] >= sequence.rank[0]:
                break
            if not self._must_wait(other):
                return True
        return False

    def _admit(self, sequence: Sequence, admissions: list[Admission], new_blocks: list[NewBlocks]) -> bool:
        """Give a waiting sequence a slot and the blocks of all its known tokens."""
        limits = self.limits
        known = len(sequence.tokens)
        found: list[int] = []
        if limits.prefix_caching and sequence.num_prompt_logprobs < 0:
            # The last known token is always computed: its logits are needed.
            found = self.pool.find(sequence.block_hashes[: (known - 1) // limits.block_size])
        missing = (known - 1) // limits.block_size + 1 - len(found)
        self.pool.share(found)
        while not self._free_slots or missing > self.pool.num_free:
            victim = None if self.leaving else self._victim(sequence)
            if victim is None:
                self.pool.release(found)
                return False
            self._preempt(victim)
        blocks = found + self.pool.allocate(missing)
        self.waiting.remove(sequence)
        insort(self.running, sequence, key=_rank)
        sequence.state = State.RUNNING
        sequence.slot = self._free_slots.pop()
        sequence.blocks = blocks
        cached = len(found) * limits.block_size
        sequence.num_planned = sequence.num_computed = cached
        if sequence.num_output == 0:
            sequence.num_cached = cached
        sequence.admission_len = known
        admissions.append(Admission(sequence.slot, sequence, sequence.tokens[:]))
        new_blocks.append(NewBlocks(sequence.slot, 0, tuple(blocks)))
        return True

    def _victim(self, newcomer: Sequence) -> Sequence | None:
        """Whom a newcomer may displace: one that nobody reads, else the last one if its priority is lower."""
        for held in self.running:
            if held.held:
                return held
        if self.running and self.running[-1].rank[0] > newcomer.rank[0]:
            return self.running[-1]
        return None

    def _make_room(self, count: int, sequence: Sequence) -> bool:
        """See that `count` blocks are free for a running sequence, taking them from those ranked below it."""
        while count > self.pool.num_free:
            if self.leaving:  # blocks are on their way back; displace nobody before they have arrived
                return False
            victim = next((s for s in self.running if s.held and s is not sequence), None)
            if victim is None:
                victim = self.running[-1]
                if victim is sequence:
                    return False
            self._preempt(victim)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.num_preemptions += 1
        self.running.remove(sequence)
        sequence.state = State.PREEMPTED
        self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        if sequence.num_in_flight:
            self.leaving.add(sequence)
        else:
            self._return_resources(sequence)

    def _return_resources(self, sequence: Sequence) -> None:
        self.leaving.discard(sequence)
        if sequence.slot >= 0:
            self._free_slots.append(sequence.slot)
            sequence.slot = -1
            self.pool.release(sequence.blocks)
            sequence.blocks = []
        sequence.num_planned = sequence.num_computed = 0
        sequence.held = False
        if sequence.state is State.PREEMPTED:
            sequence.state = State.WAITING
            insort(self.waiting, sequence, key=_rank)

    # -- committing ----------------------------------------------------------------------------------------------

    def commit(self, output: StepOutput) -> list[Update]:
        """Take in a step's results; what a sequence drew after its end is dropped."""
        updates: list[Update] = []
        draw = -1
        error = output.error
        size = self.limits.block_size
        for index, (sequence, _, start, length, _, samples) in enumerate(output.plan.rows):
            sequence.num_in_flight -= 1
            if samples:
                sequence.num_pending -= 1
                draw += 1
            if sequence.state is not ENDED:
                if error is not None:
                    updates.append(self._fail(sequence, self._step_error(output)))
                else:
                    computed = start + length
                    if computed // size > sequence.num_computed // size:
                        self._share(sequence, computed)
                    sequence.num_computed = computed
                    if output.prompt_logprobs and index in output.prompt_logprobs:
                        sequence.keep_prompt_logprobs(start, output.prompt_logprobs[index])
                    if samples:
                        updates.append(self._take(sequence, draw, output))
            if not sequence.num_in_flight and sequence in self.leaving:
                self._return_resources(sequence)
        return updates

    def _take(self, sequence: Sequence, draw: int, output: StepOutput) -> Update:
        """Append a drawn token and see whether it is the last. A stop goes before the length limit."""
        if not output.finite[draw]:
            self.pool.unregister(sequence.blocks)
            return self._fail(
                sequence, NonFiniteLogits(f"the model's logits after {len(sequence.tokens)} tokens are not finite")
            )
        token = output.token_ids[draw]
        tokens = sequence.tokens
        tokens.append(token)
        text = ""
        stop = sequence.stop
        reason: FinishReason | None = None
        stop_reason: int | str | None = None
        stream = sequence.text
        if token in stop.end_ids:
            reason = "stop"
        elif token in stop.token_ids:
            reason, stop_reason = "stop", token
        elif stream is not None:
            text = stream.push(token)
            if stream.matched is not None:
                reason, stop_reason = "stop", stream.matched
        if reason is None and len(tokens) >= stop.max_length:
            reason = "length"
        if reason is not None:
            if stream is not None:
                text += stream.finish()
            self.end(sequence)
        return quick_update((sequence, token, text, output.logprobs, draw, reason, stop_reason, None))

    def _share(self, sequence: Sequence, num_computed: int) -> None:
        """Make the blocks findable that are full now that positions up to `num_computed` are in the cache."""
        if not self.limits.prefix_caching:
            return
        size = self.limits.block_size
        digests = sequence.block_hashes
        for at in range(sequence.num_computed // size, num_computed // size):
            if at == len(digests):
                parent = digests[-1] if digests else ROOT
                digests.append(block_digest(parent, sequence.tokens[at * size : (at + 1) * size]))
            self.pool.register(sequence.blocks[at], digests[at])

    def _fail(self, sequence: Sequence, error: BaseException) -> Update:
        self.end(sequence)
        return Update(sequence, -1, "", None, -1, None, None, error)

    @staticmethod
    def _step_error(output: StepOutput) -> StepFailed:
        error = StepFailed(f"step {output.plan.step_id} failed: {output.error!r}")
        error.__cause__ = output.error
        return error

    # -- checking ------------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raise AssertionError unless slots, blocks and queues agree with each other."""
        owners = [*self.running, *self.leaving]
        slots = [s.slot for s in owners] + self._free_slots
        if sorted(slots) != list(range(self.limits.num_slots)):
            raise AssertionError(f"slots are lost or owned twice: {sorted(slots)}")
        self.pool.check_integrity(s.blocks for s in owners)
        for queue, state in ((self.waiting, State.WAITING), (self.running, State.RUNNING)):
            if any(s.state is not state for s in queue):
                raise AssertionError(f"a sequence in the {state.value} queue is in another state")
            if queue != sorted(queue, key=_rank):
                raise AssertionError(f"the {state.value} queue is out of order")
        for sequence in owners:
            if sequence.state is State.ENDED:  # what it drew since is dropped, so its counts say nothing
                continue
            if not sequence.num_computed <= sequence.num_planned <= sequence.length:
                raise AssertionError(f"{sequence!r} counts more positions than it has")
            if len(sequence.blocks) * self.limits.block_size < sequence.num_planned:
                raise AssertionError(f"{sequence!r} has positions without a block")
