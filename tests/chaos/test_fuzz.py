"""Everything at once, from a seed: whatever goes on around a request, it says what it says alone."""

import random
from collections.abc import Coroutine, Generator
from dataclasses import dataclass, replace
from types import coroutine
from typing import Any

import anyio
import pytest

from omni_async import (
    DeadlineExceeded,
    Engine,
    Finished,
    Generation,
    NonFiniteLogits,
    Request,
    SamplingParams,
    TextDelta,
)
from tests.support.engines import EOS, becomes_idle, byte_ids, scripted_engine
from tests.support.scripted import Script

pytestmark = pytest.mark.anyio

SCRIPTS = [
    Script(byte_ids("a"), [*byte_ids("abcabcabd\u00e9\u4f60"), EOS]),
    Script(byte_ids("b"), [*byte_ids("\U0001f469\u200d\U0001f680 and so on and on, for long"), EOS]),
    Script(byte_ids("n"), byte_ids("not numbers"), nan_at=3),
]
LONGEST = 96
NUM_REQUESTS = 30


@dataclass(frozen=True)
class Case:
    """A request and what its caller does with it."""

    prompt: list[int]
    sampling: SamplingParams
    priority: int
    deadline_s: float | None
    how: str
    after: int
    """How many tokens the caller sees before it does so."""

    @property
    def request(self) -> Request:
        return Request(
            prompt_token_ids=self.prompt,
            sampling=self.sampling,
            priority=self.priority,
            deadline_s=self.deadline_s,
        )


def make_case(rng: random.Random) -> Case:
    start = rng.choice([*map(byte_ids, "abn"), [7, 8, 9] * 6, [7, 8, 9] * 12, [5] * 9, []])
    return Case(
        prompt=[*start, *(rng.randrange(250) for _ in range(rng.choice([0, 1, 3, 12, 40])))] or [1],
        sampling=SamplingParams(
            temperature=rng.choice([0.0, 0.0, 1.0, 30.0]),
            top_k=rng.choice([None, 3, 40]),
            seed=rng.randrange(100),
            max_tokens=rng.choice([1, 2, 7, 20, None]),
            min_tokens=rng.choice([0, 0, 1]),
            stop=rng.choice([(), (), "bd", ("and", "nothing"), ("\u00e9",), "\U0001f680"]),
            stop_token_ids=rng.choice([(), (), (3, 4, 5), tuple(range(0, 250, 9))]),
            include_stop_str_in_output=rng.random() < 0.3,
            ignore_eos=rng.random() < 0.3,
            repetition_penalty=rng.choice([None, None, 1.3]),
            frequency_penalty=rng.choice([0.0, 0.0, 1.0]),
            logprobs=rng.choice([None, None, None, 0, 2]),
            prompt_logprobs=rng.choice([None, None, None, 0, 2]),
            n=rng.choice([1, 1, 1, 2, 3]),
        ),
        priority=rng.randrange(3),
        deadline_s=rng.choice([None] * 6 + [1e-9]),
        how=rng.choice(["read", "read", "read", "pause", "break", "abort", "drop"]),
        after=rng.randrange(6),
    )


async def ask_alone(engine: Engine, case: Case) -> Generation | None:
    """What a request says with nobody around; `None` if its logits are not numbers."""
    try:
        result = await engine.generate(replace(case, deadline_s=None).request)
    except NonFiniteLogits:
        return None
    if case.sampling.prompt_logprobs is not None:
        for completion in result.completions:
            assert len(completion.finished.prompt_logprobs or ()) == len(case.prompt)
    return result


async def consume(engine: Engine, case: Case, alone: Generation | None) -> None:
    """Play one caller and compare all that it got with what the request says alone."""
    deltas: dict[int, list[TextDelta]] = {}
    ends: dict[int, Finished] = {}
    seen = 0
    try:
        async with engine.stream(case.request) as events:
            async for event in events:
                if isinstance(event, Finished):
                    ends[event.index] = event
                    continue
                deltas.setdefault(event.index, []).append(event)
                seen += len(event.token_ids)
                if seen > case.after:
                    if case.how == "pause":
                        await anyio.lowlevel.checkpoint()
                    elif case.how == "break":
                        break
                    elif case.how == "abort":
                        engine.abort(events.request_id)
    except DeadlineExceeded:
        assert case.deadline_s is not None
        return
    except NonFiniteLogits:
        assert alone is None
        return
    stays = case.how in ("read", "pause")
    if alone is None:
        assert not stays
        return
    for completion in alone.completions:
        parts = deltas.get(completion.index, [])
        said = tuple(token for delta in parts for token in delta.token_ids)
        scores = tuple(score for delta in parts for score in delta.logprobs or ())
        assert said == completion.token_ids[: len(said)]
        assert scores == (completion.logprobs or ())[: len(scores)]
        if stays:
            end = ends[completion.index]
            assert said == completion.token_ids
            assert "".join([delta.text for delta in parts]) == completion.text
            assert (end.reason, end.stop_reason) == (completion.reason, completion.finished.stop_reason)
            # By their text: a prompt may hold the place whose logits are not numbers, and NaN is unequal to itself.
            assert repr(end.prompt_logprobs) == repr(completion.finished.prompt_logprobs)
            assert end.usage.completion_tokens == len(said)


@pytest.mark.parametrize(
    ("seed", "anyio_backend"),
    [(3, ("asyncio", {})), (7, ("asyncio", {"use_uvloop": True})), (23, ("trio", {}))],
)
async def test_everything_at_once(seed: int, anyio_backend: object) -> None:
    rng = random.Random(seed)
    cases = [make_case(rng) for _ in range(NUM_REQUESTS)]
    async with scripted_engine(SCRIPTS, max_slots=3, pipelined=False, prefix_caching=False, max_model_len=LONGEST) as e:
        alone = [await ask_alone(e, case) for case in cases]
    slots = rng.choice([2, 3, 8])
    engine = scripted_engine(
        SCRIPTS,
        max_slots=slots,
        block_size=4,
        num_blocks=-(-LONGEST // 4) + rng.choice([0, 1, 8]),
        max_model_len=LONGEST,
        max_step_tokens=slots + rng.choice([1, 5, 20]),
        max_unread_tokens=rng.choice([1, 2, 9]),
        prefix_caching=rng.random() < 0.8,
        pipelined=rng.random() < 0.8,
    )
    async with engine:
        with anyio.fail_after(30):
            async with anyio.create_task_group() as group:
                for case, result in zip(cases, alone, strict=True):
                    if case.how == "drop":
                        engine.stream(case.request)
                    else:
                        group.start_soon(consume, engine, case, result)
                    for _ in range(rng.randrange(4)):
                        await anyio.lowlevel.checkpoint()
        await becomes_idle(engine)
        assert engine._stage is not None
        engine._stage.scheduler.check_integrity()
        assert len(engine._live) == engine._live.num_answers == 0


@coroutine
def cancel_at(step: int, scope: anyio.CancelScope, body: Coroutine[Any, Any, object]) -> Generator[Any, Any, bool]:
    """Run `body`, and cancel `scope` when it waits for the `step`-th time; true if it came so far."""
    resume: Any = body.send
    value: Any = None
    waits = 0
    while True:
        try:
            trap = resume(value)
        except StopIteration:
            return waits >= step
        waits += 1
        if waits == step:
            scope.cancel()
        try:
            resume, value = body.send, (yield trap)
        except BaseException as error:
            resume, value = body.throw, error


async def test_cancelled_at_each_wait(no_threads_left: None) -> None:
    """A caller that is cancelled at its first wait, at its second, and so on, until it has none left."""

    async def life(engine: Engine) -> None:
        async with engine:
            await engine.generate(Request(prompt="a", sampling=SamplingParams(n=2)))
            async for event in engine.stream(Request(prompt="b")):
                assert isinstance(event, TextDelta | Finished)

    step, came_so_far = 0, True
    while came_so_far:
        step += 1
        engine = scripted_engine(SCRIPTS)
        with anyio.CancelScope() as scope:
            came_so_far = await cancel_at(step, scope, life(engine))
        came_so_far = came_so_far or scope.cancelled_caught
        with anyio.fail_after(10):
            await engine.aclose()
        assert len(engine._live) == 0
    assert step > 5
