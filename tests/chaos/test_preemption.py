"""Displaced at any step, with results on their way, a request goes on as if nothing had happened."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import anyio
import pytest
from torch import Tensor

from omni_async import Engine, Generation, Request, SamplingParams
from omni_async.backend.ops import Sampled, StepContext
from tests.support.engines import EOS, becomes_idle, byte_ids, scripted_engine
from tests.support.scripted import Script, ScriptedModel

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    """The kind of the caller's loop plays no part here."""
    return "asyncio"


@dataclass
class CountingModel(ScriptedModel):
    num_draws: int = 0

    def sample(self, h: Tensor, step: StepContext) -> Sampled:
        self.num_draws += len(h)
        return super().sample(h, step)


@contextmanager
def displaced_at(engine: Engine, step: int) -> Iterator[None]:
    """Preempt the last running sequence when `step` further steps have been planned."""
    assert engine._stage is not None
    scheduler = engine._stage.scheduler
    inner: Callable[[], object] = scheduler.plan
    at = scheduler.num_steps + step

    def plan() -> object:
        if scheduler.num_steps == at and scheduler.running:
            scheduler._preempt(scheduler.running[-1])
        return inner()

    scheduler.plan = plan  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        scheduler.plan = inner  # type: ignore[method-assign, assignment]


def piped(engine: Engine, depth: int) -> None:
    """Let the host run ahead of the device by `depth` steps."""
    assert engine._stage is not None
    engine._stage._depth = depth


async def together(engine: Engine, requests: Sequence[Request]) -> list[Generation]:
    results: dict[int, Generation] = {}

    async def one(index: int) -> None:
        results[index] = await engine.generate(requests[index])

    async with anyio.create_task_group() as group:
        for index in range(len(requests)):
            group.start_soon(one, index)
    return [results[index] for index in range(len(requests))]


@pytest.mark.parametrize("prefix_caching", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize("depth", [0, 1, 2])
async def test_a_lone_request_at_every_step(depth: int, prefix_caching: bool) -> None:
    request = Request(
        prompt_token_ids=[7, 1, 200, 5, 9] * 3,
        sampling=SamplingParams(
            max_tokens=20, temperature=3.0, seed=4, repetition_penalty=1.2, frequency_penalty=0.5, ignore_eos=True
        ),
    )
    model = CountingModel()
    async with scripted_engine(model, block_size=4, max_step_tokens=8, prefix_caching=prefix_caching) as engine:
        expected = await engine.generate(request)
        assert len(set(expected.token_ids)) >= 8
        piped(engine, depth)
        preemptions = 0
        for step in range(24):
            model.num_draws = 0
            with displaced_at(engine, step):
                result = await engine.generate(request)
            assert model.num_draws == 20  # what was on its way is kept, not drawn again
            assert (result.token_ids, result.usage.completion_tokens) == (expected.token_ids, 20)
            await becomes_idle(engine)
            assert engine.stats()["text"].preemptions - preemptions <= 1
            preemptions = engine.stats()["text"].preemptions
        assert preemptions >= 19  # nothing runs yet at the first step


@pytest.mark.parametrize("depth", [0, 1, 2])
async def test_three_requests_in_a_pool_for_one_and_a_half(depth: int) -> None:
    """Each needs 4 blocks, and there are 6: they displace each other, and one more is displaced at every step."""
    requests = [
        Request(prompt_token_ids=[i, 3, 50 * i] * 4, sampling=SamplingParams(max_tokens=20, ignore_eos=True))
        for i in range(3)
    ]
    async with scripted_engine(block_size=8, num_blocks=6, max_model_len=32) as engine:
        expected = [await engine.generate(request) for request in requests]
        assert len({result.token_ids for result in expected}) == 3
        piped(engine, depth)
        steps = range(0, 45, 1 if depth == 1 else 4)
        for step in steps:
            with displaced_at(engine, step):
                results = await together(engine, requests)
            for result, alone in zip(results, expected, strict=True):
                assert result.token_ids == alone.token_ids
                assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (12, 20)
            await becomes_idle(engine)
        assert engine.stats()["text"].preemptions > len(steps)


async def test_in_the_middle_of_a_character_and_of_a_stop_string() -> None:
    says = "a\U0001f336\u00e9 DEFGHX \u4f60DEFGHIJK"
    script = Script(byte_ids("?"), [*byte_ids(says), EOS])
    request = Request(prompt="?", sampling=SamplingParams(stop="DEFGHIJ", logprobs=0))
    async with scripted_engine([script]) as engine:
        for step in range(len(says.encode()) + 1):
            with displaced_at(engine, step):
                result = await engine.generate(request)
            assert result.text == says.removesuffix("DEFGHIJK")
            assert result.completions[0].finished.stop_reason == "DEFGHIJ"
            assert result.logprobs is not None
            assert [entry.token_id for entry in result.logprobs] == list(result.token_ids)
            assert result.token_ids == tuple(byte_ids(says)[:-1])
        await becomes_idle(engine)


async def test_prompt_logprobs_come_once() -> None:
    """The prompt is computed again after a displacement, in other chunks perhaps."""
    request = Request(
        prompt_token_ids=list(range(40)), sampling=SamplingParams(max_tokens=4, prompt_logprobs=1, ignore_eos=True)
    )
    async with scripted_engine(block_size=4, max_step_tokens=8) as engine:
        expected = (await engine.generate(request)).completions[0].finished.prompt_logprobs
        assert expected is not None
        for step in range(9):
            with displaced_at(engine, step):
                result = await engine.generate(request)
            assert result.completions[0].finished.prompt_logprobs == expected
        await becomes_idle(engine)
