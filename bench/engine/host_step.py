"""Host work of one step: admit, plan, prepare, commit and publish, while the model computes nothing."""

import asyncio
import cProfile
import pstats
import re
from pathlib import Path

import numpy as np
import uvloop

from bench.engine.null_stage import BLOCK_SIZE, PROMPT_LEN, Clock, Load, run_steps
from bench.report import Figure, Ratio, Report
from bench.settings import Settings

ROWS = (1, 16, 64, 256)
WARM_UP = 50
ADDRESS = re.compile(" at 0x[0-9a-f]+")
BASE_US, PER_ROW_US = 100.0, 2.0
"""The aim: microseconds of a step, and of each of its rows."""


def _run(load: Load) -> Clock:
    clock = Clock()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run_steps(clock, load))
    return clock


def measure(num_rows: int, num_steps: int, seed: int, *, with_text: bool = False, through_lane: bool = False) -> Clock:
    """The times of `num_steps` decode steps after warm-up."""
    steps = WARM_UP + num_steps
    clock = _run(Load(num_rows=num_rows, num_steps=steps, seed=seed, with_text=with_text, through_lane=through_lane))
    for times in (clock.plan, clock.prepare, clock.commit, clock.rest, clock.step):
        del times[:WARM_UP]
    return clock


def profile(num_rows: int, num_steps: int, seed: int) -> list[str]:
    """The functions that take longest themselves, from cProfile, which makes short calls look dearer than they are."""
    profiler = cProfile.Profile()
    profiler.runcall(_run, Load(num_rows=num_rows, num_steps=num_steps, seed=seed, with_text=True))
    stats = pstats.Stats(profiler).get_stats_profile().func_profiles
    ranked = sorted(stats.items(), key=lambda item: -item[1].tottime)[:18]
    lines = [f"profile of {num_rows} rows with text, us per step: own, with callees, calls per step"]
    for name, entry in ranked:
        function = ADDRESS.sub("", name)
        where = "/".join(Path(entry.file_name).parts[-2:])
        own, whole = entry.tottime / num_steps * 1e6, entry.cumtime / num_steps * 1e6
        calls = int(entry.ncalls.split("/")[0]) / num_steps
        lines.append(f"{own:9.2f} {whole:9.2f} {calls:8.1f}  {where}:{entry.line_number}({function})")
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
        clock = measure(num_rows, num_steps, settings.seed, with_text=True)
        figures.append(Figure.of(f"{num_rows:3} rows: with text", "us", clock.step, 1e6))
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
            "excludes": "the model, its inputs and outputs as tensors, and the readers' own work",
            "with text": "adds detokenising without stop strings",
            "through the lane": "adds the hops to the lane's thread and back, with an empty computation",
        },
        profile=profile(64, num_steps, settings.seed),
    )
