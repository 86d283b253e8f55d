"""The sampler and log-probabilities against the time that reading the logits once takes."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import torch
from omni_async_kernels.sampling import SamplingTables, logprobs, sample
from torch import Tensor

from bench.kernels.timing import samples_ms
from bench.report import Figure, Ratio, Report
from bench.settings import Settings

NUM_ROWS, VOCAB_SIZE = 256, 151_936
PROMPT_LEN, HISTORY_LEN = 256, 400
NUM_TOP = 20
OFF = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Case:
    """What all rows ask for, and how many times the reading of the logits it may take."""

    name: str
    temperature: float = 1.0
    top_k: int = OFF
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    scale: float = 3.0
    """Of the normal logits: 0.1 is nearly flat."""
    aim: float | None = None


GREEDY = Case("greedy", temperature=0.0, aim=1.1)
FILTERED = Case("top-k 50, top-p 0.95", top_k=50, top_p=0.95)
PENALISED = replace(
    FILTERED, name="top-k 50, top-p 0.95, penalties", repetition=1.1, presence=0.5, frequency=0.2, aim=3.0
)
CASES = (
    GREEDY,
    Case("random"),
    FILTERED,
    PENALISED,
    Case("top-p 0.95", top_p=0.95),
    Case("top-p 0.95, flat", top_p=0.95, scale=0.1, aim=6.0),
    Case("min-p 0.05", min_p=0.05),
    Case("top-k 2000, top-p 0.95", top_k=2000, top_p=0.95),
)
ALONE = (GREEDY, Case("random"), FILTERED, PENALISED, Case("top-p 0.95, flat", top_p=0.95, scale=0.1))
ALONE_US = 15.0


@dataclass(frozen=True, slots=True)
class Rows:
    """The arguments of the sampler for rows that all ask for the same."""

    logits: Tensor
    slots: Tensor
    lengths: Tensor
    tokens: Tensor
    tables: SamplingTables

    @classmethod
    def of(cls, case: Case, num_rows: int, dtype: torch.dtype, seed: int) -> "Rows":
        """Random logits and histories."""
        generator = torch.Generator("cuda").manual_seed(seed)
        logits = torch.randn((num_rows, VOCAB_SIZE), generator=generator, device="cuda") * case.scale
        tokens = torch.randint(0, VOCAB_SIZE, (num_rows, HISTORY_LEN), generator=generator, device="cuda")
        # As the engine keeps them: a line for each slot, floats first.
        floats = (case.temperature, case.top_p, case.min_p, case.repetition, case.presence, case.frequency)
        integers = (case.top_k, 0, seed, 0, PROMPT_LEN, 0, 0, NUM_TOP)
        lines = torch.empty((num_rows, len(floats) + len(integers)), dtype=torch.int32, device="cuda")
        lines.view(torch.float32)[:, : len(floats)] = torch.tensor(floats, device="cuda")
        lines[:, len(floats) :] = torch.tensor(integers, dtype=torch.int32, device="cuda")
        lines[:, len(floats) + 1] = torch.arange(num_rows, device="cuda")  # a seed for each row
        temperature, top_p, min_p, repetition, presence, frequency = lines.view(torch.float32).T[: len(floats)]
        top_k, seed_low, seed_high, choice, prompt_len, num_bias, restricted, num_logprobs = lines.T[len(floats) :]
        entries = torch.zeros((num_rows, 8), dtype=torch.int32, device="cuda")
        allowed = torch.zeros((num_rows, -(-VOCAB_SIZE // 32)), dtype=torch.int32, device="cuda")
        return cls(
            logits=logits.to(dtype),
            slots=torch.arange(num_rows, device="cuda"),
            lengths=torch.full((num_rows,), HISTORY_LEN, device="cuda"),
            tokens=tokens.int(),
            tables=SamplingTables(
                temperature,
                top_p,
                min_p,
                repetition,
                presence,
                frequency,
                top_k,
                seed_low,
                seed_high,
                choice,
                prompt_len,
                num_bias,
                restricted,
                num_logprobs,
                bias_ids=entries,
                bias_until=entries,
                bias_values=entries.float(),
                allowed=allowed,
            ),
        )

    def sample(self) -> object:
        """Our sampler."""
        return sample(self.logits, self.slots, self.lengths, self.tokens, self.tables)

    def logprobs(self) -> object:
        """Our log-probabilities, of the first token and the best."""
        return logprobs(self.logits, torch.zeros_like(self.slots), self.slots, self.tables, NUM_TOP)


def _read_ms(logits: Tensor, repeats_ms: int) -> float:
    """The best of what torch can do to read all logits once."""
    readers: list[Callable[[], object]] = [
        partial(torch.amax, logits, dim=1),
        partial(torch.sum, logits, dim=1),
        partial(torch.sum, logits),
        partial(torch.amax, logits),
    ]
    return min(median(samples_ms(read, repeats_ms)) for read in readers)


def run(settings: Settings) -> Report:
    """Measure in float32; the reading first, in the same run."""
    repeats_ms = settings.pick(200, 30)
    rows = Rows.of(GREEDY, NUM_ROWS, torch.float32, settings.seed)
    read = _read_ms(rows.logits, repeats_ms)
    figures = [Figure.of(f"{NUM_ROWS} rows: read once", "us", [read], 1e3)]
    ratios: list[Ratio] = []
    for case in CASES:
        rows = Rows.of(case, NUM_ROWS, torch.float32, settings.seed)
        times = samples_ms(rows.sample, repeats_ms)
        figures.append(Figure.of(f"{NUM_ROWS} rows: {case.name}", "us", times, 1e3))
        ratios.append(Ratio(f"{NUM_ROWS} rows: {case.name} / read once", median(times) / read, case.aim))
    times = samples_ms(rows.logprobs, repeats_ms)
    figures.append(Figure.of(f"{NUM_ROWS} rows: log-probabilities, best {NUM_TOP}", "us", times, 1e3))
    ratios.append(Ratio(f"{NUM_ROWS} rows: log-probabilities / read once", median(times) / read))
    for case in ALONE:
        rows = Rows.of(case, 1, torch.float32, settings.seed)
        figures.append(Figure.of(f"1 row: {case.name}", "us", samples_ms(rows.sample, repeats_ms), 1e3, ALONE_US))
    figures.append(
        Figure.of(f"1 row: log-probabilities, best {NUM_TOP}", "us", samples_ms(rows.logprobs, repeats_ms), 1e3)
    )
    conditions = {
        "dtype": "float32",
        "vocabulary": VOCAB_SIZE,
        "history": HISTORY_LEN,
        "logits": "normal, of deviation 3 (flat: 0.1)",
        "excluded": "launches: each time is one graph replay by device events, L2 overwritten before it",
    }
    return Report(name="sampling", figures=figures, ratios=ratios, conditions=conditions)
