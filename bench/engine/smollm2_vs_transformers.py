"""SmolLM2-135M in float32 on the CPU: the engine against `transformers` generate, on the same weights."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

from bench.engine.checkpoint import checkpoint
from bench.engine.peer import Peer
from bench.engine.streams import Prompts, greedy, trace
from bench.report import Figure, Ratio, Report
from bench.settings import Settings
from omni_async import Engine

PROMPT_LEN = 64
NUM_CONCURRENT = 8
LONG_PROMPT_LEN = 512
TAIL_LEN = 8
"""Tokens after a shared prefix."""


class Results:
    """Figures and ratios in the order in which they were measured."""

    def __init__(self) -> None:
        self.figures: list[Figure] = []
        self.ratios: list[Ratio] = []

    def figure(self, name: str, unit: str, samples: list[float], scale: float = 1.0) -> None:
        """Add a figure."""
        self.figures.append(Figure.of(name, unit, samples, scale))


def _engine(path: Path, settings: Settings, prefix_caching: bool) -> Engine:
    return Engine.from_pretrained(
        path,
        device="cpu",
        dtype="float32",
        threads=settings.threads,
        max_slots=NUM_CONCURRENT,
        max_step_tokens=LONG_PROMPT_LEN + TAIL_LEN,
        prefix_caching=prefix_caching,
        progress=False,
    )


async def _decode(engine: Engine, peer: Peer, prompts: Prompts, settings: Settings, results: Results) -> None:
    """One request alone: time between its tokens."""
    num_tokens, repeats = settings.pick((64, 7), (4, 1))
    ours: list[float] = []
    theirs: list[float] = []
    for repeat in range(repeats + 1):
        prompt = prompts.ids(PROMPT_LEN)
        mine = await trace(engine, greedy(prompt, num_tokens))
        other = peer.trace(prompt, num_tokens)
        if repeat > 0:  # the first is warm-up
            ours.append(mine.inter_token_s)
            theirs.append(other.inter_token_s)
    prompt = prompts.ids(PROMPT_LEN)
    answer = (await engine.generate(greedy(prompt, num_tokens))).token_ids
    agree = sum(a == b for a, b in zip(answer, peer.generate(prompt, num_tokens), strict=True))
    results.figure("decode, 1 request: ours", "ms/token", ours, 1e3)
    results.figure("decode, 1 request: transformers", "ms/token", theirs, 1e3)
    results.figure("equal greedy tokens of one answer", "share", [agree / num_tokens])
    results.ratios.append(Ratio("decode, 1 request: ours / transformers", median(ours) / median(theirs), 1.0))


async def _concurrent(engine: Engine, peer: Peer, prompts: Prompts, settings: Settings, results: Results) -> None:
    """Eight requests at once here, one after another there."""
    num_tokens, repeats = settings.pick((64, 3), (4, 1))
    ours: list[float] = []
    theirs: list[float] = []
    for repeat in range(repeats + 1):
        batch = [prompts.ids(PROMPT_LEN) for _ in range(NUM_CONCURRENT)]
        began = perf_counter()
        await asyncio.gather(*(engine.generate(greedy(prompt, num_tokens)) for prompt in batch))
        mine = perf_counter() - began
        if repeat == 0:  # warm-up; the peer is warm
            continue
        ours.append(NUM_CONCURRENT * num_tokens / mine)
        theirs.append(NUM_CONCURRENT * num_tokens / sum(peer.seconds(prompt, num_tokens) for prompt in batch))
    results.figure(f"{NUM_CONCURRENT} requests at once: ours", "tokens/s", ours)
    results.figure(f"{NUM_CONCURRENT} requests one by one: transformers", "tokens/s", theirs)
    ratio = median(ours) / median(theirs)
    results.ratios.append(Ratio(f"{NUM_CONCURRENT} requests: ours / transformers", ratio, 3.0, "at least"))


async def _first_token(engine: Engine, peer: Peer, prompts: Prompts, settings: Settings, results: Results) -> None:
    """A long prompt and one token."""
    repeats = settings.pick(9, 1)
    ours: list[float] = []
    theirs: list[float] = []
    for repeat in range(repeats + 1):
        prompt = prompts.ids(LONG_PROMPT_LEN)
        mine = (await trace(engine, greedy(prompt, 1))).first_token_s
        other = peer.seconds(prompt, 1)
        if repeat > 0:
            ours.append(mine)
            theirs.append(other)
    results.figure(f"first token after {LONG_PROMPT_LEN}: ours", "ms", ours, 1e3)
    results.figure(f"first token after {LONG_PROMPT_LEN}: transformers", "ms", theirs, 1e3)
    results.ratios.append(Ratio("first token: ours / transformers", median(ours) / median(theirs), 1.1))


async def _shared_prefix(engine: Engine, prompts: Prompts, settings: Settings, results: Results) -> None:
    """A second request that begins with the first one's prompt."""
    repeats = settings.pick(7, 1)
    first: list[float] = []
    second: list[float] = []
    for repeat in range(repeats + 1):
        prefix = prompts.ids(LONG_PROMPT_LEN)
        cold = (await trace(engine, greedy(prefix + prompts.ids(TAIL_LEN), 1))).first_token_s
        warm = (await trace(engine, greedy(prefix + prompts.ids(TAIL_LEN), 1))).first_token_s
        if repeat > 0:
            first.append(cold)
            second.append(warm)
    results.figure("shared prefix: first request's first token", "ms", first, 1e3)
    results.figure("shared prefix: second request's first token", "ms", second, 1e3)
    results.ratios.append(Ratio("shared prefix: first / second", median(first) / median(second), 5.0, "at least"))


def _load_memory(path: Path, weight_bytes: int, settings: Settings, results: Results) -> None:
    """Peak memory of a start, in processes of their own."""
    peaks: list[float] = []
    for _ in range(settings.pick(3, 1)):
        command = (sys.executable, "-m", "bench.engine.load_memory", str(path), str(settings.threads))
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"the measurement of memory failed with status {done.returncode}:\n{done.stderr}")
        peaks.append(json.loads(done.stdout)["peak_bytes"])
    results.figure("peak anonymous memory of a start", "MiB", peaks, 2**-20)
    results.figure("weights in float32", "MiB", [weight_bytes], 2**-20)
    results.ratios.append(Ratio("peak memory / weights", median(peaks) / weight_bytes, 1.15))


async def _measure(path: Path, peer: Peer, settings: Settings, results: Results) -> None:
    prompts = Prompts(settings.seed, peer.vocab_size)
    async with _engine(path, settings, prefix_caching=False) as engine:
        await _decode(engine, peer, prompts, settings, results)
        await _concurrent(engine, peer, prompts, settings, results)
        await _first_token(engine, peer, prompts, settings, results)
    async with _engine(path, settings, prefix_caching=True) as engine:
        await _shared_prefix(engine, prompts, settings, results)


def run(settings: Settings) -> Report:
    """Measure both in turn, request by request, in this process."""
    path = checkpoint(settings)
    torch.set_num_threads(settings.threads)
    results = Results()
    peer = Peer(path)
    asyncio.run(_measure(path, peer, settings, results))
    _load_memory(path, peer.weight_bytes, settings, results)
    return Report(
        name="smollm2_vs_transformers",
        figures=results.figures,
        ratios=results.ratios,
        conditions={
            "checkpoint": path.name,
            "dtype": "float32",
            "threads": settings.threads,
            "sampling": "greedy, end marks ignored",
            "prompts": f"random ids, all different; {PROMPT_LEN} tokens, or {LONG_PROMPT_LEN} where the name says so",
            "prefix_caching": "off, but for the shared prefix",
            "ours": "as a caller of Engine.stream or Engine.generate sees it; text is detokenised",
            "transformers": "generate, one prompt at a time, with its default cache and attention; no detokenising",
            "memory": "anonymous pages above the level after imports, until the engine has answered one request",
        },
    )
