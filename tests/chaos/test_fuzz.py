"""Everything at once, from a seed: whatever goes on around a request, it says what it says alone."""

import random
from collections.abc import Coroutine, Generator
from dataclasses import dataclass, replace
from types import coroutine
from typing import Any

import anyio
import pytest

from omni_async import DeadlineExceeded, Engine, Finished, Generation, Request, SamplingParams, TextDelta
from tests.support.engines import EOS, becomes_idle, byte_ids, scripted_engine
from tests.support.scripted import Script

pytestmark = pytest.mark.anyio

SCRIPTS = [
    Script(byte_ids("a"), [*byte_ids("abcabcabd\u00e9\u4f60"), EOS]),
    Script(byte_ids("b"), [*byte_ids("\U0001f469\u200d\U0001f680 and so on and on, for long"), EOS]),
]
LONGEST = 96


@dataclass(frozen=True)
class Case:
    """A request and what its caller does with it."""

    request: Request
    how: str
    after: int
    """How many tokens the caller sees before it does so."""


def make_case(rng: random.Random) -> Case:
    start = rng.choice([byte_ids("a"), byte_ids("b"), [7, 8, 9] * 6, [7, 8, 9] * 12, [5] * 9, []])
    prompt = [*start, *(rng.randrange(250) for _ in range(rng.choice([0, 1, 3, 12, 40])))] or [1]
    scored = rng.random() < 0.25
    sampling = SamplingParams(
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
        logprobs=rng.choice([None, None, 0, 2, -1]),
        prompt_logprobs=rng.choice([0, 2]) if scored else None,
        n=rng.choice([1, 1, 1, 2, 3]),
    )
    return Case(
        Request(
            prompt_token_ids=prompt,
            sampling=sampling,
            priority=rng.randrange(3),
            deadline_s=rng.choice([None] * 6 + [1e-9]),
        ),
        rng.choice(["read", "read", "read", "pause", "break", "abort", "drop"]),
        rng.randrange(6),
    )


def record(result: Generation) -> list[object]:
    """All of a result that must not depend on what else goes on."""
    return [(c.text, c.token_ids, c.logprobs, c.reason, c.finished.stop_reason, scores(c.finished))
            for c in result.completions]  # fmt: skip


def scores(finished: Finished) -> object:
    return finished.prompt_logprobs


async def consume(engine: Engine, case: Case, alone: Generation) -> None:
    """Play one caller and compare all that it got with what the request says alone."""
    gained: dict[int, list[int]] = {}
    texts: dict[int, str] = {}
    ends: dict[int, Finished] = {}
    try:
        async with engine.stream(case.request) as events:
            async for event in events:
                if isinstance(event, Finished):
                    ends[event.index] = event
                else:
                    gained.setdefault(event.index, []).extend(event.token_ids)
                    texts[event.index] = texts.get(event.index, "") + event.text
                if sum(map(len, gained.values())) > case.after:
                    if case.how == "pause":
                        await anyio.lowlevel.checkpoint()
                    elif case.how == "break":
                        break
                    elif case.how == "abort":
                        engine.abort(events.request_id)
    except DeadlineExceeded:
        assert case.request.deadline_s is not None
        return
    for completion in alone.completions:
        index = completion.index
        said = tuple(gained.get(index, ()))
        assert said == completion.token_ids[: len(said)]
        assert completion.text.startswith(texts.get(index, "")) or ends[index].reason == "abort"
        if case.how in ("read", "pause"):
            assert said == completion.token_ids
            assert texts.get(index, "") == completion.text
            end = ends[index]
            assert (end.reason, end.stop_reason) == (completion.reason, completion.finished.stop_reason)
            assert end.prompt_logprobs == completion.finished.prompt_logprobs
            assert end.usage.completion_tokens == len(said)


@pytest.mark.parametrize("seed", range(6))
async def test_everything_at_once(seed: int) -> None:
    rng = random.Random(seed)
    cases = [make_case(rng) for _ in range(40)]
    async with scripted_engine(SCRIPTS, max_slots=1, pipelined=False, prefix_caching=False, max_model_len=LONGEST) as e:
        alone = [await e.generate(replace(case.request, deadline_s=None)) for case in cases]
        for case, result in zip(cases, alone, strict=True):
            if case.request.sampling.prompt_logprobs is not None:  # type: ignore[union-attr]
                for completion in result.completions:
                    assert len(completion.finished.prompt_logprobs or ()) == len(case.request.prompt_token_ids or ())
    slots = rng.choice([2, 3, 8])
    engine = scripted_engine(
        SCRIPTS,
        max_slots=slots,
        block_size=4,
        num_blocks=-(-LONGEST // 4) + rng.choice([0, 1, 8]),
        max_model_len=LONGEST,
        max_step_tokens=slots + rng.choice([0, 1, 5, 20]),
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
    send, value = body.send, None
    waits = 0
    while True:
        try:
            trap = send(value)
        except StopIteration:
            return waits >= step
        waits += 1
        if waits == step:
            scope.cancel()
        try:
            send, value = body.send, (yield trap)
        except BaseException as error:
            send, value = body.throw, error


async def test_cancelled_at_each_wait() -> None:
    """A caller that is cancelled at its first wait, its second, and so on, until it has none left."""

    async def life() -> None:
        engine = scripted_engine(SCRIPTS)
        engines.append(engine)
        async with engine:
            await engine.generate(Request(prompt="a", sampling=SamplingParams(n=2)))
            async for event in engine.stream(Request(prompt="b")):
                assert isinstance(event, TextDelta | Finished)

    engines: list[Engine] = []
    step, came_so_far = 0, True
    while came_so_far:
        step += 1
        came_so_far = False
        with anyio.CancelScope() as scope:
            came_so_far = await cancel_at(step, scope, life())
        came_so_far = came_so_far or scope.cancelled_caught
        with anyio.fail_after(10):
            await engines[-1].aclose()
        assert len(engines[-1]._live) == 0
    assert step > 5
