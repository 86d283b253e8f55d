"""`omni-async bench engine`: throughput and latency of this machine, seen from a caller."""

import argparse
import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from time import perf_counter

import numpy as np

from omni_async.api import Engine
from omni_async.cli.exit_code import ExitCode
from omni_async.cli.flags import Commands, add_command, make_engine, positive
from omni_async.types import Request, SamplingParams, Timings

MORE = """Sends requests with different random prompts and asks for answers of a fixed length. One request runs
before the clock starts."""

NUM_TOKEN_IDS = 256
"""Prompts are drawn from the ids below this: every vocabulary holds them."""

Figures = Mapping[str, float]


def add_parser(subjects: Commands) -> None:
    """Declare the subject."""
    parser = add_command(subjects, "engine", "measure throughput and latency of a model", MORE)
    parser.add_argument("--requests", type=positive, metavar="N", default=16, help="how many (%(default)s)")
    parser.add_argument(
        "--concurrency",
        type=positive,
        metavar="N",
        nargs="+",
        default=[4],
        help="at the same time; several numbers are measured one after another (4)",
    )
    parser.add_argument("--prompt-len", type=positive, metavar="N", default=128, help="tokens (%(default)s)")
    parser.add_argument("--output-len", type=positive, metavar="N", default=64, help="tokens (%(default)s)")
    parser.add_argument("--seed", type=int, metavar="N", default=0, help="of the random prompts (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON objects, one a line, instead of tables")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the latencies, as .png, .svg or .pdf")
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="afterwards, run once more under torch's profiler and write a Chrome trace (.json or .json.gz)",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> ExitCode:
    """Measure, print, and draw."""
    if options.plot is not None:
        from omni_async.measure.plot import check_plotting

        check_plotting(options.plot)
    measured = asyncio.run(_measure(make_engine(options), options))
    for figures in measured:
        print(json.dumps(figures) if options.json else _table(figures))
    if options.plot is not None:
        _plot(options.plot, measured)
    return ExitCode.OK


async def _measure(engine: Engine, options: argparse.Namespace) -> list[Figures]:
    """The figures of each concurrency; then the trace."""
    source = np.random.default_rng(options.seed)
    sampling = SamplingParams(temperature=0.0, max_tokens=options.output_len, ignore_eos=True)

    def make_request() -> Request:
        ids = source.integers(NUM_TOKEN_IDS, size=options.prompt_len).tolist()
        return Request(prompt_token_ids=ids, sampling=sampling)

    measured: list[Figures] = []
    async with engine:
        await engine.generate(make_request())
        for concurrency in options.concurrency:
            requests = [make_request() for _ in range(options.requests)]
            start = perf_counter()
            timings = await _send(engine, requests, concurrency)
            measured.append(_figures(perf_counter() - start, timings, concurrency, options))
        if options.trace is not None:
            from omni_async.measure.trace import tracing

            requests = [make_request() for _ in range(options.concurrency[-1])]
            with tracing(options.trace):
                await _send(engine, requests, len(requests))
    return measured


async def _send(engine: Engine, requests: Sequence[Request], concurrency: int) -> list[Timings]:
    """The times of each request; so many callers share them out."""
    left = iter(requests)
    return list(chain.from_iterable(await asyncio.gather(*[_work(engine, left) for _ in range(concurrency)])))


async def _work(engine: Engine, requests: Iterator[Request]) -> list[Timings]:
    """One caller: takes the next request as soon as its last one has ended."""
    return [(await engine.generate(request)).timings for request in requests]


def _figures(wall_s: float, timings: Sequence[Timings], concurrency: int, options: argparse.Namespace) -> Figures:
    first = np.array([t.first_token_s for t in timings if t.first_token_s is not None])
    gaps = np.array([t.inter_token_s for t in timings])
    produced = sum(t.completion_tokens for t in timings)
    return {
        "requests": len(timings),
        "concurrency": concurrency,
        "prompt_len": options.prompt_len,
        "output_len": options.output_len,
        "wall_s": wall_s,
        "requests_per_s": len(timings) / wall_s,
        "output_tokens_per_s": produced / wall_s,
        "first_token_s_median": float(np.median(first)),
        "first_token_s_p99": float(np.percentile(first, 99)),
        "inter_token_s_median": float(np.median(gaps)),
        "inter_token_s_p99": float(np.percentile(gaps, 99)),
    }


def _table(figures: Figures) -> str:
    def line(name: str, key: str) -> str:
        return f"  {name:20}{figures[key + '_median'] * 1e3:10.1f} ms median {figures[key + '_p99'] * 1e3:10.1f} ms p99"

    return "\n".join(
        [
            f"{figures['requests']} requests, {figures['concurrency']} at a time: "
            f"{figures['prompt_len']} tokens in, {figures['output_len']} out",
            f"  {'all of them':20}{figures['wall_s']:10.2f} s",
            f"  {'requests':20}{figures['requests_per_s']:10.2f} /s",
            f"  {'answer tokens':20}{figures['output_tokens_per_s']:10.1f} /s",
            line("first token", "first_token_s"),
            line("each further token", "inter_token_s"),
        ]
    )


def _plot(path: Path, measured: Sequence[Figures]) -> None:
    from omni_async.measure.plot import plot_lines

    plot_lines(
        path,
        f"{measured[0]['prompt_len']} tokens in, {measured[0]['output_len']} out",
        "requests at the same time",
        "ms",
        {
            f"{name}, {kind}": {int(figures["concurrency"]): figures[f"{key}_{kind}"] * 1e3 for figures in measured}
            for name, key in (("first token", "first_token_s"), ("each further token", "inter_token_s"))
            for kind in ("median", "p99")
        },
    )
