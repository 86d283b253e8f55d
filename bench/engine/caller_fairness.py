"""Callers and the engine leave each other alone: a blocked caller delays nobody, and the engine blocks no caller."""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from functools import partial
from statistics import median

from bench.engine.checkpoint import checkpoint
from bench.engine.loop_hold import Holds, MeasuredLoop, read
from bench.engine.null_model import VOCAB_SIZE, null_engine
from bench.engine.streams import Prompts, Trace, greedy, trace
from bench.report import Figure, Ratio, Report
from bench.settings import Settings
from omni_async import Engine

BLOCK_S = 0.05
PROMPT_LEN = 32
ENDLESS = 1000
NUM_STREAMS = 32
MOST_HELD_S = 0.001


def nothing() -> None:
    """Let the loop go on."""


def sleep() -> None:
    """Block the caller's loop and let other threads run."""
    time.sleep(BLOCK_S)


def compute() -> None:
    """Block the caller's loop in pure Python, which wants the interpreter lock all the time."""
    until = time.perf_counter() + BLOCK_S
    number = 0
    while time.perf_counter() < until:
        number += 1


DISTURBANCES = {"reads on": nothing, "sleeps 50 ms": sleep, "computes 50 ms": compute}
"""What another caller does on its own loop, in its own thread, after each event."""


async def _in_thread(main: Coroutine[object, object, Trace | None]) -> Trace | None:
    """Run a caller on a thread and a loop of its own."""
    return await asyncio.to_thread(asyncio.run, main)


async def _beside(engine: Engine, disturb: Callable[[], None], prompts: Prompts, num_tokens: int) -> Trace:
    """The trace of one caller beside another that disturbs."""
    over = threading.Event()
    loop = asyncio.get_running_loop()
    started = asyncio.Event()

    async def disturber() -> None:
        while not over.is_set():
            async with engine.stream(greedy(prompts.ids(PROMPT_LEN), ENDLESS)) as events:
                async for _ in events:
                    loop.call_soon_threadsafe(started.set)
                    disturb()
                    if over.is_set():
                        break

    async with asyncio.TaskGroup() as group:
        group.create_task(_in_thread(disturber()))
        await started.wait()
        try:
            seen = await _in_thread(trace(engine, greedy(prompts.ids(PROMPT_LEN), num_tokens)))
        finally:
            over.set()
    assert seen is not None
    return seen


async def _gaps(
    name: str, engine: Engine, prompts: Prompts, num_tokens: int, repeats: int
) -> tuple[list[Figure], list[Ratio]]:
    figures: list[Figure] = []
    traces: dict[str, list[Trace]] = {kind: [] for kind in DISTURBANCES}
    for repeat in range(repeats + 1):
        for kind, disturb in DISTURBANCES.items():
            seen = await _beside(engine, disturb, prompts, num_tokens)
            if repeat > 0:
                traces[kind].append(seen)
    for kind, kept in traces.items():
        gaps = [gap for one in kept for gap in one.gaps_s]
        figures.append(Figure.of(f"{name}: gap while another {kind}", "ms", gaps, 1e3))
        per_event = [one.num_tokens / len(one.times) for one in kept]
        figures.append(Figure.of(f"{name}:   tokens per event", "tokens", per_event))
    times = {kind: median(one.inter_token_s for one in kept) for kind, kept in traces.items()}
    calm = times["reads on"]
    ratios = [
        Ratio(f"{name}: time per token, another sleeps / reads on", times["sleeps 50 ms"] / calm, 1.1),
        Ratio(f"{name}: time per token, another computes / reads on", times["computes 50 ms"] / calm),
    ]
    return figures, ratios


def _hold_figures(name: str, holds: Holds) -> tuple[list[Figure], list[Ratio]]:
    figures = [
        Figure.of(f"{name}: engine holds a loop, CPU", "us", holds.cpu_s, 1e6),
        Figure.of(f"{name}: engine holds a loop, wall", "us", holds.wall_s, 1e6),
    ]
    return figures, [Ratio(f"{name}: longest hold, CPU / 1 ms", max(holds.cpu_s) / MOST_HELD_S, 1.0)]


def _read_many(engine: Engine, prompts: Prompts, num_tokens: int) -> Holds:
    """Many streams on one loop."""
    holds = Holds()

    async def main() -> None:
        requests = [greedy(prompts.ids(PROMPT_LEN), num_tokens) for _ in range(NUM_STREAMS)]
        await asyncio.gather(*(read(engine, request, holds, nothing) for request in requests))

    with asyncio.Runner(loop_factory=lambda: MeasuredLoop(holds)) as runner:
        runner.run(main())
    return holds


def _read_late(engine: Engine, prompts: Prompts, num_tokens: int, logprobs: int | None) -> Holds:
    """One stream whose caller blocks its loop until all tokens lie there unread."""
    holds = Holds()

    def block() -> None:
        before = sum(stats.tokens for stats in engine.stats().values())
        while sum(stats.tokens for stats in engine.stats().values()) < before + num_tokens - 1:
            time.sleep(0.001)

    request = greedy(prompts.ids(PROMPT_LEN), num_tokens, logprobs)
    with asyncio.Runner(loop_factory=lambda: MeasuredLoop(holds)) as runner:
        runner.run(read(engine, request, holds, block))
    return holds


async def _measure(settings: Settings) -> tuple[list[Figure], list[Ratio]]:
    figures: list[Figure] = []
    ratios: list[Ratio] = []

    async def add(part: Coroutine[object, object, tuple[list[Figure], list[Ratio]]]) -> None:
        more, quotients = await part
        figures.extend(more)
        ratios.extend(quotients)

    async def holds(name: str, work: Callable[[], Holds]) -> tuple[list[Figure], list[Ratio]]:
        return _hold_figures(name, await asyncio.to_thread(work))

    unread, num_tokens, repeats = settings.pick((1000, 500, 5), (50, 20, 1))
    prompts = Prompts(settings.seed, VOCAB_SIZE)
    async with null_engine(prefix_caching=False, max_slots=NUM_STREAMS) as engine:
        await add(_gaps("null", engine, prompts, num_tokens, repeats))
        await add(holds(f"null, {NUM_STREAMS} streams", partial(_read_many, engine, prompts, num_tokens)))
        for logprobs in (None, 20):
            name = f"null, {unread} unread, logprobs {logprobs}"
            await add(holds(name, partial(_read_late, engine, prompts, unread, logprobs)))
    if settings.quick:
        return figures, ratios
    async with _real_engine(settings) as engine:
        await add(_gaps("SmolLM2", engine, prompts, 64, 3))
        await add(holds(f"SmolLM2, {NUM_STREAMS} streams", partial(_read_many, engine, prompts, 32)))
        await add(holds("SmolLM2, 200 unread, logprobs 20", partial(_read_late, engine, prompts, 200, 20)))
    return figures, ratios


def _real_engine(settings: Settings) -> AbstractAsyncContextManager[Engine]:
    # One thread computes, so that a core is left for the callers.
    return Engine.from_pretrained(
        checkpoint(settings),
        device="cpu",
        dtype="float32",
        threads=1,
        max_slots=NUM_STREAMS,
        prefix_caching=False,
        progress=False,
    )


def run(settings: Settings) -> Report:
    """Measure the null model, whose steps cost only the engine's own work, and (unless quick) SmolLM2."""
    figures, ratios = asyncio.run(_measure(settings))
    return Report(
        name="caller_fairness",
        figures=figures,
        ratios=ratios,
        conditions={
            "callers": "each on a thread and an asyncio loop of its own, in the engine's process",
            "disturbance": "after each event that the other caller gets, until the measured request has ended",
            "prompt_tokens": PROMPT_LEN,
            "torch_threads": 1,
            "prefix_caching": False,
            "hold": "one callback of the engine, one turn of EventStream.__anext__, or one call of Engine.stream; "
            "CPU is the time of the caller's thread, wall adds waiting for the interpreter lock and for a core",
            "logprobs": "the null model has no tokenizer, so the bytes of tokens are not looked up",
        },
    )
