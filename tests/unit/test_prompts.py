"""Prompts at their limits, beside requests that must not notice: nothing at all, and one token too many."""

import anyio
import pytest
from tokenizers import Tokenizer

from omni_async import Engine, Generation, PromptTooLong, Request, RequestError, SamplingParams, TextDelta
from tests.support.checkpoints import byte_tokenizer
from tests.support.engines import EOS, becomes_idle, byte_ids, scripted_engine
from tests.support.scripted import Script

pytestmark = pytest.mark.anyio

BOS = 256
HELLO = Script(byte_ids("Hi"), [*byte_ids("Hello you"), EOS])
FROM_BOS = Script([BOS], [*byte_ids("ok"), EOS])
ENDLESS = Script(byte_ids("go"), byte_ids("x"))


def engine_of(tokenizer: Tokenizer) -> Engine:
    return scripted_engine([HELLO, FROM_BOS, ENDLESS], tokenizer=tokenizer)


EMPTY: list[dict[str, object]] = [
    {"prompt": ""},
    {"prompt": [""]},
    {"prompt_token_ids": []},
    {"messages": []},
]


@pytest.mark.parametrize("bos", [False, True], ids=["no BOS", "BOS"])
@pytest.mark.parametrize("fields", EMPTY, ids=str)
async def test_an_empty_prompt_beside_a_running_request(fields: dict[str, object], bos: bool) -> None:
    async with engine_of(byte_tokenizer(bos)) as engine:
        neighbour = engine.stream(Request(prompt_token_ids=byte_ids("go"), sampling=SamplingParams(max_tokens=100)))
        first = await anext(neighbour)
        assert isinstance(first, TextDelta)
        with anyio.fail_after(5):
            if bos and fields == {"prompt": ""}:
                result = await engine.generate(Request(prompt=""))
                assert (result.text, result.reason, result.usage.prompt_tokens) == ("ok", "stop", 1)
            else:
                with pytest.raises(RequestError, match="empty|string"):
                    await engine.generate(Request(**fields))  # type: ignore[arg-type]
        text = first.text + "".join([e.text async for e in neighbour if isinstance(e, TextDelta)])
        assert text == "x" * 100
        assert (await engine.generate(Request(prompt_token_ids=byte_ids("Hi")))).text == "Hello you"
        await becomes_idle(engine)


async def test_messages_that_render_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.engines.CHAT_TEMPLATE", "{% for m in messages %}{{ m['content'] }}{% endfor %}")
    async with engine_of(byte_tokenizer()) as engine:
        with pytest.raises(RequestError, match="the prompt is empty"):
            await engine.generate(Request(messages=[{"role": "user", "content": ""}]))
        assert (await engine.generate(Request(messages=[{"role": "user", "content": "Hi"}]))).text == "Hello you"
        await becomes_idle(engine)


@pytest.mark.parametrize("kind", ["ids", "text"])
async def test_prompts_about_the_limit_in_a_burst_with_short_ones(kind: str) -> None:
    """Of 63 tokens one answer token comes out, of 62 two; 64 and more are refused with both numbers."""
    async with scripted_engine(max_model_len=64, max_slots=3, num_blocks=12) as engine:
        results: dict[int, Generation | PromptTooLong] = {}

        async def ask(count: int) -> None:
            sampling = SamplingParams(max_tokens=8, ignore_eos=True)
            try:
                if kind == "text":
                    results[count] = await engine.generate(Request(prompt="y" * count, sampling=sampling))
                else:
                    results[count] = await engine.generate(Request(prompt_token_ids=[5] * count, sampling=sampling))
            except PromptTooLong as error:
                results[count] = error

        counts = (1, 62, 2, 63, 3, 64, 4, 65, 5, 1000, 6)
        with anyio.fail_after(10):
            async with anyio.create_task_group() as group:
                for count in counts:
                    group.start_soon(ask, count)
        for count in counts:
            result = results[count]
            if count < 64:
                assert isinstance(result, Generation)
                assert (len(result.token_ids), result.reason) == (min(8, 64 - count), "length")
            else:
                assert isinstance(result, PromptTooLong)
                assert str(count) in str(result)
                assert "64" in str(result)
        await becomes_idle(engine)
