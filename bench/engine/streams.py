"""Requests of random tokens, and what their callers see of them."""

import random
from dataclasses import dataclass, field
from time import perf_counter

from omni_async import Engine, Request, SamplingParams, TextDelta


class Prompts:
    """Random token ids, no two prompts alike."""

    def __init__(self, seed: int, vocab_size: int) -> None:
        self._draw = random.Random(seed)
        self._vocab_size = vocab_size

    def ids(self, length: int) -> list[int]:
        """The next `length` ids."""
        return [self._draw.randrange(self._vocab_size) for _ in range(length)]


def greedy(prompt_ids: list[int], max_tokens: int, logprobs: int | None = None) -> Request:
    """A request for exactly `max_tokens` tokens, the most probable ones."""
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=logprobs)
    return Request(prompt_token_ids=prompt_ids, sampling=sampling)


@dataclass(slots=True)
class Trace:
    """When the tokens of one request reached its caller."""

    submitted: float = field(default_factory=perf_counter)
    times: list[float] = field(default_factory=list)
    """Of each event with tokens."""
    num_tokens: int = 0

    def mark(self, count: int) -> None:
        """Note that `count` tokens have come."""
        self.times.append(perf_counter())
        self.num_tokens += count

    @property
    def first_token_s(self) -> float:
        """Seconds from the call to the first token."""
        return self.times[0] - self.submitted

    @property
    def inter_token_s(self) -> float:
        """Mean seconds between tokens."""
        return (self.times[-1] - self.times[0]) / (self.num_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between consecutive events."""
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]


async def trace(engine: Engine, request: Request) -> Trace:
    """Stream a request to its end."""
    seen = Trace()
    async with engine.stream(request) as events:
        async for event in events:
            if isinstance(event, TextDelta):
                seen.mark(len(event.token_ids))
    return seen
