"""`omni-async bench`: throughput and latency of this machine, seen from a caller."""

import argparse
import asyncio
import json
from collections.abc import Iterator, Sequence
from itertools import chain
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


def add_parser(commands: Commands) -> None:
    """Declare the command."""
    parser = add_command(commands, "bench", "measure throughput and latency", MORE)
    parser.add_argument("--requests", type=positive, metavar="N", default=16, help="how many (%(default)s)")
    parser.add_argument("--concurrency", type=positive, metavar="N", default=4, help="at the same time (%(default)s)")
    parser.add_argument("--prompt-len", type=positive, metavar="N", default=128, help="tokens (%(default)s)")
    parser.add_argument("--output-len", type=positive, metavar="N", default=64, help="tokens (%(default)s)")
    parser.add_argument("--seed", type=int, metavar="N", default=0, help="of the random prompts (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> ExitCode:
    """Measure and print."""
    wall_s, timings = asyncio.run(_measure(make_engine(options), options))
    figures = _figures(wall_s, timings, options)
    print(json.dumps(figures) if options.json else _table(figures))
    return ExitCode.OK


async def _measure(engine: Engine, options: argparse.Namespace) -> tuple[float, Sequence[Timings]]:
    """Seconds for all requests, and the times of each."""
    source = np.random.default_rng(options.seed)
    sampling = SamplingParams(temperature=0.0, max_tokens=options.output_len, ignore_eos=True)

    def make_request() -> Request:
        ids = source.integers(NUM_TOKEN_IDS, size=options.prompt_len).tolist()
        return Request(prompt_token_ids=ids, sampling=sampling)

    async with engine:
        await engine.generate(make_request())
        requests = iter([make_request() for _ in range(options.requests)])
        start = perf_counter()
        timings = await asyncio.gather(*[_work(engine, requests) for _ in range(options.concurrency)])
        return perf_counter() - start, list(chain.from_iterable(timings))


async def _work(engine: Engine, requests: Iterator[Request]) -> list[Timings]:
    """One caller: takes the next request as soon as its last one has ended."""
    return [(await engine.generate(request)).timings for request in requests]


def _figures(wall_s: float, timings: Sequence[Timings], options: argparse.Namespace) -> dict[str, float]:
    first = np.array([t.first_token_s for t in timings if t.first_token_s is not None])
    gaps = np.array([t.inter_token_s for t in timings])
    produced = sum(t.completion_tokens for t in timings)
    return {
        "requests": len(timings),
        "concurrency": options.concurrency,
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


def _table(figures: dict[str, float]) -> str:
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
