"""A reader that lags loses nothing, holds nobody up, and costs a bounded amount of memory."""

import anyio
import pytest

from omni_async import Finished, Request, SamplingParams, TextDelta
from tests.support.engines import EOS, becomes_idle, byte_ids, scripted_engine
from tests.support.scripted import Script

pytestmark = pytest.mark.anyio

LONG = Script(byte_ids("go"), byte_ids("abcdefghij" * 20))
HELLO = Script(byte_ids("Hi"), [*byte_ids("Hello you"), EOS])


async def test_pieces_pile_up_and_none_is_lost() -> None:
    sampling = SamplingParams(max_tokens=200, logprobs=2)
    async with scripted_engine([LONG]) as engine:
        whole = await engine.generate(Request(prompt="go", sampling=sampling))
        events: list[TextDelta | Finished] = []
        async with engine.stream(Request(prompt="go", sampling=sampling)) as stream:
            async for event in stream:
                events.append(event)
                await anyio.sleep(0.01)
        deltas = [event for event in events if isinstance(event, TextDelta)]
        assert len(events) <= 200
        assert "".join(d.text for d in deltas) == whole.text == "abcdefghij" * 20
        assert tuple(t for d in deltas for t in d.token_ids) == whole.token_ids
        assert tuple(p for d in deltas for p in d.logprobs or ()) == whole.logprobs
        assert len(whole.token_ids) == 200
        await becomes_idle(engine)


async def test_an_answer_is_read_after_its_end() -> None:
    """All pieces have piled up before the first is taken."""
    sampling = SamplingParams(max_tokens=200, logprobs=1)
    async with scripted_engine([LONG]) as engine:
        whole = await engine.generate(Request(prompt="go", sampling=sampling))
        stream = engine.stream(Request(prompt="go", sampling=sampling))
        with anyio.fail_after(5):
            while engine.stats()["text"].tokens < 400:
                await anyio.sleep(0.001)
        await becomes_idle(engine)
        events = [event async for event in stream]
        deltas = [event for event in events if isinstance(event, TextDelta)]
        assert len(deltas) <= 2
        assert "".join(d.text for d in deltas) == whole.text
        assert tuple(t for d in deltas for t in d.token_ids) == whole.token_ids
        assert tuple(p for d in deltas for p in d.logprobs or ()) == whole.logprobs
        assert len(whole.token_ids) == 200
        assert isinstance(events[-1], Finished)


@pytest.mark.parametrize("capacity", [1, 2, 7])
async def test_an_unread_request_is_held_and_goes_on(capacity: int) -> None:
    async with scripted_engine([LONG, HELLO], max_unread_tokens=capacity) as engine:
        async with engine.stream(Request(prompt="go", sampling=SamplingParams(max_tokens=50))) as stream:
            with anyio.fail_after(5):
                while engine.stats()["text"].tokens < capacity or not engine.stats()["text"].held:
                    await anyio.sleep(0.001)
            assert engine.stats()["text"].tokens == capacity
            for _ in range(3):  # others go on meanwhile
                assert (await engine.generate(Request(prompt="Hi"))).text == "Hello you"
            text = ""
            async for event in stream:
                if isinstance(event, TextDelta):
                    assert len(event.token_ids) <= capacity
                    text += event.text
        assert text == "abcdefghij" * 5
        await becomes_idle(engine)


async def test_held_requests_give_their_slots_and_blocks_to_others() -> None:
    async with scripted_engine(
        [LONG, HELLO], max_slots=2, num_blocks=16, max_model_len=256, max_unread_tokens=4
    ) as engine:
        sampling = SamplingParams(max_tokens=100)
        held = [engine.stream(Request(prompt="go", sampling=sampling)) for _ in range(3)]
        with anyio.fail_after(5):
            assert (await engine.generate(Request(prompt="Hi", priority=9))).text == "Hello you"
        for stream in held:
            text = "".join([e.text async for e in stream if isinstance(e, TextDelta)])
            assert text == "abcdefghij" * 10
        await becomes_idle(engine)


async def test_one_answer_unread_does_not_lose_its_sibling() -> None:
    async with scripted_engine([LONG], max_unread_tokens=5) as engine:
        result = await engine.generate(Request(prompt="go", sampling=SamplingParams(n=3, max_tokens=60)))
        assert [c.text for c in result.completions] == ["abcdefghij" * 6] * 3


async def test_many_unread_logprobs_come_in_events_of_a_bounded_size() -> None:
    """Turning thousands of them into objects at once would hold the caller's loop."""
    sampling = SamplingParams(max_tokens=200, logprobs=20, prompt_logprobs=20)
    async with scripted_engine([LONG]) as engine:
        stream = engine.stream(Request(prompt="go", sampling=sampling))
        with anyio.fail_after(10):
            while engine.stats()["text"].requests or engine.stats()["text"].tokens < 200:
                await anyio.sleep(0.001)
        events = [event async for event in stream]
        sizes = [len(event.token_ids) for event in events if isinstance(event, TextDelta)]
        assert sum(sizes) == 200
        assert max(sizes) * 21 <= 256
        end = events[-1]
        assert isinstance(end, Finished)
        assert end.prompt_logprobs is not None
        assert len(end.prompt_logprobs) == 2
