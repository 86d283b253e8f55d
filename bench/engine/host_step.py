"""Host work of one step: admit, plan, prepare, commit and publish, while the model computes nothing.

The stage's real loop runs over a runner that answers each plan at once. Between two steps that runner stands in
for readers who keep up; its time is left out.
"""

import asyncio
import cProfile
import pstats
import random
from array import array
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Self

import anyio
import numpy as np
import uvloop

from bench.report import Figure, Ratio, Report
from bench.settings import Settings
from omni_async.bridge import Waiter
from omni_async.errors import EngineClosed
from omni_async.mailbox import Mailbox
from omni_async.runner.lane import ThreadLane
from omni_async.runner.runner import HostRows
from omni_async.scheduler.plan import StepOutput, StepPlan
from omni_async.scheduler.prefix import block_digests
from omni_async.scheduler.scheduler import Limits, Scheduler, Update
from omni_async.scheduler.sequence import Sequence, StopRule
from omni_async.stage import ActiveRequest, Stage

ROWS = (1, 16, 64, 256)
PROMPT_LEN = 64
BLOCK_SIZE = 16
WARM_UP = 50
BASE_US, PER_ROW_US = 100.0, 2.0
"""The aim: microseconds of a step, and of each of its rows."""


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
    """Answers every plan with arbitrary tokens, at once or through a lane."""

    def __init__(self, clock: Clock, mailboxes: list[Mailbox], tokens: list[int], lane: ThreadLane | None) -> None:
        self._clock = clock
        self._mailboxes = mailboxes
        self._tokens = tokens
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
        HostRows.of(plan.rows)
        prepared = perf_counter()
        clock = self._clock
        clock.prepare.append(prepared - began)
        clock.step.append(prepared - self._resumed)
        clock.rest.append(clock.step[-1] - clock.plan[-1] - clock.prepare[-1] - sum(clock.commit[-1:]))
        self.steps_left -= 1
        if self.steps_left == 0:
            self.on_last()
        self._read_all()
        count = sum(row.samples for row in plan.rows)
        output = StepOutput(plan, self._tokens[:count], [True] * count)
        if self._lane is not None:
            future = self._lane.run(lambda: output)
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


async def _steps(clock: Clock, num_rows: int, num_steps: int, seed: int, through_lane: bool) -> None:
    """Run `num_steps` decode steps of `num_rows` rows, each with a prompt of its own."""
    draw = random.Random(seed)
    max_length = PROMPT_LEN + BLOCK_SIZE + WARM_UP + num_steps + 16
    limits = Limits(
        num_slots=num_rows,
        num_blocks=num_rows * (max_length // BLOCK_SIZE + 1),
        block_size=BLOCK_SIZE,
        max_step_tokens=num_rows * (PROMPT_LEN + BLOCK_SIZE),
        prefix_caching=True,
    )
    mailboxes: list[Mailbox] = []
    lane = ThreadLane("bench-lane") if through_lane else None
    runner = NullRunner(clock, mailboxes, [draw.randrange(1000) for _ in range(num_rows)], lane)
    stage = Stage(TimedScheduler(limits, clock), runner, pipelined=True, on_end=lambda mailbox: None)
    for number in range(num_rows):
        mailbox = Mailbox(f"r{number}", number, perf_counter(), 1, 1024)
        mailbox.waiter = Waiter("a loop", _post, anyio.Event())  # every reader waits: the most work for `publish`
        # Lengths differ, so that the rows do not all need a new block in the same step.
        prompt = array("i", [draw.randrange(1000) for _ in range(PROMPT_LEN + number % BLOCK_SIZE)])
        sequence = Sequence(
            prompt,
            rank=(0, number),
            stop=StopRule(token_ids=frozenset(), end_ids=frozenset({1000}), max_length=max_length),
            outlet=mailbox.outlets[0],
            block_hashes=block_digests(prompt, BLOCK_SIZE),
        )
        mailboxes.append(mailbox)
        stage.submit(ActiveRequest(mailbox, [sequence]))
    runner.steps_left = WARM_UP + num_steps
    runner.on_last = partial(stage.close, EngineClosed("the benchmark is over"))
    await stage.run()


def _on_uvloop(run: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await run()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


def measure(num_rows: int, num_steps: int, seed: int, *, through_lane: bool = False) -> Clock:
    """The times of `num_steps` decode steps after warm-up."""
    clock = Clock()
    _on_uvloop(partial(_steps, clock, num_rows, num_steps, seed, through_lane))
    for times in (clock.plan, clock.prepare, clock.commit, clock.rest, clock.step):
        del times[:WARM_UP]
    return clock


def profile(num_rows: int, num_steps: int, seed: int) -> list[str]:
    """The functions that take longest themselves, from cProfile, which makes short calls look dearer than they are."""
    profiler = cProfile.Profile()
    profiler.runcall(_on_uvloop, partial(_steps, Clock(), num_rows, num_steps, seed, False))
    stats = pstats.Stats(profiler).get_stats_profile().func_profiles
    steps = WARM_UP + num_steps
    ranked = sorted(stats.items(), key=lambda item: -item[1].tottime)[:18]
    lines = [f"profile of {num_rows} rows, us per step: own, with callees, calls per step"]
    for name, entry in ranked:
        where = "/".join(Path(entry.file_name).parts[-2:])
        own, whole = entry.tottime / steps * 1e6, entry.cumtime / steps * 1e6
        calls = int(entry.ncalls.split("/")[0]) / steps
        lines.append(f"{own:9.2f} {whole:9.2f} {calls:8.1f}  {where}:{entry.line_number}({name})")
    return lines


def run(settings: Settings) -> Report:
    """Measure steps of 1 to 256 rows."""
    num_steps = settings.pick(1000, 20)
    figures: list[Figure] = []
    ratios: list[Ratio] = []
    medians: list[float] = []
    for num_rows in ROWS:
        clock = measure(num_rows, num_steps, settings.seed)
        aim = BASE_US + PER_ROW_US * num_rows
        step = Figure.of(f"{num_rows:3} rows: step", "us", clock.step, 1e6, aim)
        medians.append(step.median)
        figures.append(step)
        parts = {"plan": clock.plan, "prepare": clock.prepare, "commit": clock.commit, "admit, publish": clock.rest}
        figures += [Figure.of(f"{num_rows:3} rows:   {part}", "us", times, 1e6) for part, times in parts.items()]
        ratios.append(Ratio(f"{num_rows:3} rows: step / aim", step.median / aim, 1.0))
    for num_rows in ROWS:
        clock = measure(num_rows, num_steps, settings.seed, through_lane=True)
        figures.append(Figure.of(f"{num_rows:3} rows: through the lane", "us", clock.step, 1e6))
    slope, base = np.polyfit(ROWS, medians, 1)
    figures.append(Figure.of("line through the steps: base", "us", [base], aim=BASE_US))
    figures.append(Figure.of("line through the steps: per row", "us", [slope], aim=PER_ROW_US))
    return Report(
        name="host_step",
        figures=figures,
        ratios=ratios,
        conditions={
            "steps": num_steps,
            "warm_up_steps": WARM_UP,
            "prompt_tokens": f"{PROMPT_LEN} to {PROMPT_LEN + BLOCK_SIZE - 1}, random",
            "block_size": BLOCK_SIZE,
            "prefix_caching": True,
            "pipelined": True,
            "event_loop": "uvloop",
            "excludes": "the model, its inputs and outputs as tensors, detokenising, and the readers' own work; "
            "'through the lane' adds the hops to the lane's thread and back, with an empty computation",
        },
        profile=profile(64, num_steps, settings.seed),
    )
