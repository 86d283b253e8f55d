"""Text models on a CUDA device, as a caller of `Engine.stream` sees them: `python -m bench.engine.text_on_cuda`.

Weights are random, in released models' shapes; each model gives a report of its own. Ceilings are measured first.
"""

import argparse
import asyncio
import gc
import json
import tempfile
import traceback
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
import uvloop

from bench.engine.aims import AIMS, NO_AIMS, Aims
from bench.engine.idle import DeviceTime, read_activities
from bench.engine.shapes import SHAPES, Shape
from bench.engine.streams import Prompts, Trace
from bench.environment import Environment
from bench.report import Figure, Ratio, Report
from omni_async import Engine, Request, SamplingParams, TextDelta
from omni_async.measure.ceilings import Ceilings
from omni_async.measure.trace import tracing
from omni_async.options import Device

RESULTS = Path(__file__).parent.parent / "results"
BATCHES = (1, 16, 64, 256)
PROMPT_LEN, LONG_PROMPT_LEN = 128, 2048
MAX_MODEL_LEN = 4096
BLOCK_SIZE = 16
ROW_LEN = 1536
"""Tokens of cache for each row of the largest batch."""
WARM_UP_TOKENS = 8
TRACED_STEPS = 50
SAMPLINGS: Mapping[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0.0),
    "sampled": SamplingParams(temperature=0.8, top_k=50, top_p=0.95),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured of each model."""

    batches: Sequence[int] = BATCHES
    prompt_lens: Sequence[int] = (PROMPT_LEN, LONG_PROMPT_LEN)
    """For the time to the first token; the batches have the first."""
    output_len: int = 256
    least_requests: int = 4
    """Small batches are repeated until there are so many."""
    first_tokens: int = 10
    """Requests for each time to the first token."""
    seed: int = 0
    device: Device = "cuda"
    trace: Path | None = None
    """Where the traces go; model and batch are added to the name."""


@dataclass(slots=True)
class Results:
    """What was found so far of one model."""

    shape: Shape
    ceilings: Ceilings
    aims: Aims
    figures: list[Figure] = field(default_factory=list)
    ratios: list[Ratio] = field(default_factory=list)
    profile: list[str] = field(default_factory=list)
    distinct: dict[str, str] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    async def attempt(self, name: str, work: Awaitable[None]) -> None:
        """Do some work whose failure is a result too: the rest is measured all the same."""
        try:
            await work
        except Exception as error:
            self.errors[name] = repr(error)
            traceback.print_exc()

    def against_limit(self, name: str, samples_s: Sequence[float], limit_s: float, aim_ms: float | None) -> None:
        """Add measured times and the share of the limit that they reach."""
        self.figures.append(Figure.of(name, "ms", samples_s, 1e3, aim_ms))
        self.figures.append(Figure.of(f"{name}: limit", "ms", [limit_s], 1e3))
        self.ratios.append(Ratio(f"{name}: limit / measured", limit_s / median(samples_s)))


async def _follow(engine: Engine, request: Request, seen: Trace) -> int:
    """Read a request to its end, and return its last token."""
    last = -1
    async with engine.stream(request) as events:
        async for event in events:
            if isinstance(event, TextDelta):
                seen.mark(len(event.token_ids))
                last = event.token_ids[-1]
    return last


def _request(prompt: list[int], sampling: SamplingParams, max_tokens: int, seed: int = 0) -> Request:
    params = SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        seed=seed,
        max_tokens=max_tokens,
        ignore_eos=True,
    )
    return Request(prompt_token_ids=prompt, sampling=params)


async def _run_batch(engine: Engine, requests: Sequence[Request]) -> tuple[list[Trace], list[int], float]:
    """Start all at once, a task for each in one loop: their traces, their last tokens, and seconds for all."""
    began = perf_counter()
    traces = [Trace() for _ in requests]
    async with asyncio.TaskGroup() as group:
        readers = [group.create_task(_follow(engine, *pair)) for pair in zip(requests, traces, strict=True)]
    return traces, [reader.result() for reader in readers], perf_counter() - began


async def _measure_batch(engine: Engine, prompts: Prompts, plan: Plan, batch: int, kind: str, results: Results) -> None:
    """Time between tokens, throughput, and tokens in an event."""

    def requests(max_tokens: int) -> list[Request]:
        return [_request(prompts.ids(plan.prompt_lens[0]), SAMPLINGS[kind], max_tokens, seed) for seed in range(batch)]

    await _run_batch(engine, requests(WARM_UP_TOKENS))
    traces: list[Trace] = []
    last: list[int] = []
    rates: list[float] = []
    while len(traces) < plan.least_requests:
        seen, ends, seconds = await _run_batch(engine, requests(plan.output_len))
        traces += seen
        last += ends
        rates.append(batch * plan.output_len / seconds)
    name = f"batch {batch}, {kind}"
    aims = results.aims if kind == "greedy" else NO_AIMS
    limit_s = results.shape.decode_limit_s(batch, plan.prompt_lens[0] + plan.output_len // 2, results.ceilings)
    times = [seen.inter_token_s for seen in traces]
    results.against_limit(f"{name}: inter-token", times, limit_s, aims.inter_token_ms.get(batch))
    per_event = [seen.num_tokens / len(seen.times) for seen in traces]
    results.figures.append(Figure.of(f"{name}: tokens per event", "tokens", per_event))
    results.figures.append(Figure.of(f"{name}: throughput", "tokens/s", rates))
    if (aim := aims.tokens_per_s.get(batch)) is not None:
        results.ratios.append(Ratio(f"{name}: throughput / {aim:g}", median(rates) / aim, 1.0, "at least"))
    results.distinct[name] = f"{len(set(last))} of {len(last)}"


async def _measure_first_token(engine: Engine, prompts: Prompts, plan: Plan, length: int, results: Results) -> None:
    """One request alone, for one token."""
    times: list[float] = []
    for repeat in range(plan.first_tokens + 1):
        seen = Trace()
        await _follow(engine, _request(prompts.ids(length), SAMPLINGS["greedy"], 1), seen)
        if repeat > 0:  # the first is warm-up
            times.append(seen.first_token_s)
    limit_s = results.shape.prompt_limit_s(length, results.ceilings)
    results.against_limit(f"first token after {length}", times, limit_s, results.aims.first_token_ms.get(length))


async def _trace_steps(engine: Engine, prompts: Prompts, plan: Plan, batch: int, path: Path, results: Results) -> None:
    """Some steps in which every row decodes, under torch's profiler; what it costs is in the trace too."""
    max_tokens = min(MAX_MODEL_LEN, max(plan.batches) * ROW_LEN // batch) - plan.prompt_lens[0]
    requests = [_request(prompts.ids(plan.prompt_lens[0]), SAMPLINGS["greedy"], max_tokens) for _ in range(batch)]
    traces = [Trace() for _ in requests]
    async with asyncio.TaskGroup() as group:
        readers = [group.create_task(_follow(engine, *pair)) for pair in zip(requests, traces, strict=True)]

        async def until(num_tokens: int) -> None:
            while min(seen.num_tokens for seen in traces) < num_tokens and not any(  # noqa: ASYNC110
                reader.done() for reader in readers
            ):
                await asyncio.sleep(0.001)

        await until(WARM_UP_TOKENS)
        with tracing(path):
            await asyncio.sleep(0.005)  # the readers take what came while the profiler started
            await until(min(seen.num_tokens for seen in traces) + TRACED_STEPS)
        for reader in readers:
            reader.cancel()
    if plan.device == "cuda":
        time = DeviceTime.of(read_activities(path))
        results.figures.append(Figure.of(f"batch {batch}, traced: idle", "%", [time.idle_share], 100))
        results.profile += [f"batch {batch}, traced", *time.lines()]


async def measure_model(name: str, shape: Shape, ceilings: Ceilings, plan: Plan) -> Report:
    """Measure one model; failures of parts are in the report's conditions."""
    results = Results(shape, ceilings, AIMS.get(name, NO_AIMS))
    results.figures += [
        Figure.of("copy bandwidth", "TB/s", [ceilings.bandwidth], 1e-12),
        Figure.of("matrix product", "TFLOP/s", [ceilings.rate], 1e-12),
    ]
    prompts = Prompts(plan.seed, shape.vocab_size)

    async def measure(folder: Path) -> None:
        began = perf_counter()
        async with Engine.from_pretrained(
            folder,
            load_format="random",
            device=plan.device,
            max_slots=max(plan.batches),
            max_model_len=MAX_MODEL_LEN,
            block_size=BLOCK_SIZE,
            num_blocks=max(max(plan.batches) * ROW_LEN, MAX_MODEL_LEN) // BLOCK_SIZE,
            prefix_caching=False,
            progress=False,
        ) as engine:
            entered = perf_counter()
            await engine.generate(_request(prompts.ids(plan.prompt_lens[0]), SAMPLINGS["greedy"], 1))
            results.figures.append(Figure.of("start: until the engine is entered", "s", [entered - began]))
            results.figures.append(Figure.of("start: until its first token", "s", [perf_counter() - began]))
            for length in plan.prompt_lens:
                what = f"first token after {length}"
                await results.attempt(what, _measure_first_token(engine, prompts, plan, length, results))
            for batch in plan.batches:
                for kind in SAMPLINGS:
                    what = f"batch {batch}, {kind}"
                    await results.attempt(what, _measure_batch(engine, prompts, plan, batch, kind, results))
                if plan.trace is not None:
                    path = plan.trace.with_name(f"{name}-{batch}-{plan.trace.name}")
                    traced = _trace_steps(engine, prompts, plan, batch, path, results)
                    await results.attempt(f"batch {batch}, traced", traced)

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shape.config()))
        await results.attempt("the engine", measure(Path(folder)))
    return Report(
        name=f"text_on_cuda_{name}",
        figures=results.figures,
        ratios=results.ratios,
        profile=results.profile,
        conditions={
            "model": shape.config(),
            "weights": "random, bfloat16",
            "prompts": f"random ids, all different; {plan.prompt_lens[0]} tokens where no other number is named",
            "output_tokens": plan.output_len,
            "batch": "so many requests started at once, a task for each in one uvloop event loop; end marks ignored",
            "sampled": "temperature 0.8, top-k 50, top-p 0.95",
            "inter-token": "(last - first) / (tokens - 1) of each request, as its reader saw it; includes the steps "
            "that compute the others' prompts",
            "throughput": "tokens of all answers / time from the first call to the last end, prompts included",
            "limit": f"bench/engine/shapes.py, at the mean context of {plan.prompt_lens[0] + plan.output_len // 2}",
            "options": {
                "max_slots": max(plan.batches),
                "max_model_len": MAX_MODEL_LEN,
                "block_size": BLOCK_SIZE,
                "prefix_caching": False,
            },
            "start": "imports excluded; kernels compiled before, in this process or on disk, are not compiled again",
            "excludes": "tokenising and detokenising: there is no tokenizer",
            "distinct last tokens": results.distinct,
            "errors": results.errors,
        },
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the models that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m bench.engine.text_on_cuda", description=__doc__)
    parser.add_argument("--model", nargs="+", choices=list(SHAPES), default=["Qwen3-0.6B"], help="(%(default)s)")
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES), help="(%(default)s)")
    parser.add_argument("--quick", action="store_true", help="short answers, few repeats: shows that it works")
    parser.add_argument("--trace", type=Path, metavar="FILE", help=f"also trace {TRACED_STEPS} steps of each batch")
    parser.add_argument("--seed", type=int, default=0, help="of the random prompts (%(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the JSON goes")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("this needs a CUDA device, and the machine has none, or torch was built without it")
    environment = Environment.here(options.seed, options.quick)
    plan = Plan(batches=options.batches, seed=options.seed, trace=options.trace)
    if options.quick:
        plan = Plan(
            batches=options.batches,
            seed=options.seed,
            trace=options.trace,
            output_len=32,
            least_requests=1,
            first_tokens=2,
        )
    ceilings = Ceilings.measure(50 if options.quick else 300)
    torch.cuda.empty_cache()
    print(f"{environment.gpu}", flush=True)
    for name in options.model:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            report = runner.run(measure_model(name, SHAPES[name], ceilings, plan))
        print(f"{report.table()}\n-> {report.write(options.out, environment).name}\n", flush=True)
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
