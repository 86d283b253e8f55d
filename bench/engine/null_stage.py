"""A stage whose runner answers each plan at once: what is left is the host's work.

Between two steps that runner stands in for readers who keep up; its time is left out.
"""

import asyncio
from array import array
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random
from string import ascii_lowercase
from time import perf_counter
from types import TracebackType
from typing import Self

import torch
from tokenizers import Tokenizer, decoders, models

from omni_async.errors import EngineClosed
from omni_async.mailbox import Mailbox
from omni_async.models.protocol import CacheLayout, ModelSpec
from omni_async.runner.device_state import DeviceState
from omni_async.runner.lane import ThreadLane
from omni_async.runner.memory import CachePlan
from omni_async.runner.runner import split_gained
from omni_async.runner.step_shape import StepShape
from omni_async.scheduler.plan import StepOutput, StepPlan, Update
from omni_async.scheduler.prefix import block_digests
from omni_async.scheduler.scheduler import Limits, Scheduler
from omni_async.scheduler.sequence import Sequence, StopRule
from omni_async.stage import ActiveRequest, Stage
from omni_async.text import TextStream, Vocabulary

PROMPT_LEN = 64
BLOCK_SIZE = 16
VOCAB_SIZE = 1000


@dataclass
class Clock:
    """Seconds of each step, by part."""

    plan: list[float] = field(default_factory=list)
    prepare: list[float] = field(default_factory=list)
    commit: list[float] = field(default_factory=list)
    rest: list[float] = field(default_factory=list)
    """Admit and publish."""
    step: list[float] = field(default_factory=list)
    """From the end of one launch to the end of the next."""


class TimedScheduler(Scheduler):
    """A scheduler that looks at the clock."""

    def __init__(self, limits: Limits, clock: Clock) -> None:
        super().__init__(limits)
        self._clock = clock

    def plan(self) -> StepPlan | None:
        """Time the plan of a step."""
        began = perf_counter()
        plan = super().plan()
        self._clock.plan.append(perf_counter() - began)
        return plan

    def commit(self, output: StepOutput) -> list[Update]:
        """Time the commit of a step."""
        began = perf_counter()
        updates = super().commit(output)
        self._clock.commit.append(perf_counter() - began)
        return updates


class NullRunner:
    """Answers every plan with random tokens, at once or through a lane."""

    def __init__(
        self, state: DeviceState, clock: Clock, mailboxes: list[Mailbox], draw: Random, lane: ThreadLane | None
    ) -> None:
        self._state = state
        self._clock = clock
        self._mailboxes = mailboxes
        self._draw = draw
        self._lane = lane
        self._loop = asyncio.get_running_loop()
        self._resumed = perf_counter()
        self.on_last: Callable[[], None]
        self.steps_left = 0

    async def __aenter__(self) -> Self:
        if self._lane is not None:
            self._lane.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lane is not None:
            await self._lane.stop()

    def launch(self, plan: StepPlan) -> Awaitable[StepOutput]:
        """Prepare the rows as the real runner does, and have the answer ready."""
        began = perf_counter()
        count = sum([row.samples for row in plan.rows])
        gained, rest = split_gained(plan)
        shape = StepShape(plan.num_tokens, len(plan.rows), count, single=plan.num_tokens == len(plan.rows))
        shape.pack(plan.rows, gained)
        if plan.admissions or rest:
            self._state.slots.pack(self._state.entries(plan.admissions, rest))
        prepared = perf_counter()
        clock = self._clock
        clock.prepare.append(prepared - began)
        clock.step.append(prepared - self._resumed)
        clock.rest.append(clock.step[-1] - clock.plan[-1] - clock.prepare[-1] - sum(clock.commit[-1:]))
        self.steps_left -= 1
        if self.steps_left == 0:
            self.on_last()
        self._read_all()
        output = StepOutput(plan, self._draw.choices(range(VOCAB_SIZE), k=count), [True] * count)
        if self._lane is not None:
            future = self._lane.run(lambda: lambda: output)
        else:
            future = self._loop.create_future()
            future.set_result(output)
        self._resumed = perf_counter()
        return future

    def _read_all(self) -> None:
        for mailbox in self._mailboxes:
            mailbox.pieces.clear()
            mailbox.outlets[0].taken = mailbox.outlets[0].produced


def _post(callback: Callable[..., object], /, *arguments: object) -> None:
    """A caller's loop to which nothing has to be carried."""


class NobodyWaits:
    """A waiter whose loop has nothing to do."""

    loop = "a loop"
    post = staticmethod(_post)

    def set(self) -> None:
        """Nothing."""

    async def wait(self) -> None:
        """Nothing."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """What the stage is to do."""

    num_rows: int
    num_steps: int
    seed: int
    with_text: bool = False
    """Turn tokens into text, as `commit` does when the checkpoint has a tokenizer."""
    through_lane: bool = False
    """Send each step through the lane's thread and back, with nothing to compute there."""


async def run_steps(clock: Clock, load: Load) -> None:
    """Run decode steps of rows that each have a prompt of their own."""
    draw = Random(load.seed)
    max_length = PROMPT_LEN + BLOCK_SIZE + load.num_steps + 16
    limits = Limits(
        num_slots=load.num_rows,
        num_blocks=load.num_rows * (max_length // BLOCK_SIZE + 1),
        block_size=BLOCK_SIZE,
        max_step_tokens=load.num_rows * (PROMPT_LEN + BLOCK_SIZE),
        prefix_caching=True,
    )
    vocabulary = Vocabulary(_tokenizer(draw)) if load.with_text else None
    mailboxes: list[Mailbox] = []
    spec = ModelSpec(1, VOCAB_SIZE, max_length, CacheLayout(num_layers=0, num_kv_heads=1, head_size=1))
    plan = CachePlan(limits.num_blocks, max_length)
    state = DeviceState(spec, plan, load.num_rows, BLOCK_SIZE, torch.float32, torch.device("cpu"))
    runner = NullRunner(state, clock, mailboxes, draw, ThreadLane("bench-lane") if load.through_lane else None)
    stage = Stage(TimedScheduler(limits, clock), runner, output="text", pipelined=True, on_end=lambda mailbox: None)
    for number in range(load.num_rows):
        mailbox = Mailbox(f"r{number}", number, perf_counter(), 1, 1024)
        # Every reader waits: the most work for `publish`.
        mailbox.waiter = NobodyWaits()
        # Lengths differ, so that the rows do not all need a new block in the same step.
        prompt = array("i", draw.choices(range(VOCAB_SIZE), k=PROMPT_LEN + number % BLOCK_SIZE))
        sequence = Sequence(
            prompt,
            rank=(0, number),
            stop=StopRule(token_ids=frozenset(), end_ids=frozenset({VOCAB_SIZE}), max_length=max_length),
            outlet=mailbox.outlets[0],
            block_hashes=block_digests(prompt, BLOCK_SIZE),
            text=TextStream(vocabulary.detokenizer(True)) if vocabulary is not None else None,
        )
        mailboxes.append(mailbox)
        stage.submit(ActiveRequest(mailbox, [sequence]))
    runner.steps_left = load.num_steps
    runner.on_last = partial(stage.close, EngineClosed("the benchmark is over"))
    await stage.run()


def _tokenizer(draw: Random) -> Tokenizer:
    """A byte-level tokenizer of random words."""
    words = {"\u0120" * (len_ % 2) + "".join(draw.choices(ascii_lowercase, k=1 + len_ % 8)) for len_ in range(4000)}
    vocab = {word: number for number, word in enumerate(sorted(words)[:VOCAB_SIZE])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
