"""What a caller of a running engine sees."""

import anyio
import pytest

from omni_async import (
    DuplicateRequest,
    Engine,
    EngineClosed,
    EngineNotStarted,
    EngineStateError,
    Finished,
    OptionError,
    PromptTooLong,
    QueueFull,
    Request,
    RequestError,
    SamplingParams,
    TextDelta,
)
from tests.support.engines import EOS, becomes_idle, byte_ids, scripted_engine
from tests.support.scripted import Script, ScriptedModel

pytestmark = pytest.mark.anyio

HELLO = Script(byte_ids("Hi"), [*byte_ids("Hello you"), EOS])
ENDLESS = Script(byte_ids("go"), byte_ids("x"))


async def test_streams_text_ids_and_an_end() -> None:
    async with scripted_engine([HELLO]) as engine:
        events = [event async for event in engine.stream(Request(prompt="Hi", request_id="a"))]
        deltas, end = events[:-1], events[-1]
        assert isinstance(end, Finished)
        assert "".join(d.text for d in deltas if isinstance(d, TextDelta)) == "Hello you"
        assert [t for d in deltas if isinstance(d, TextDelta) for t in d.token_ids] == [*byte_ids("Hello you"), EOS]
        assert (end.reason, end.stop_reason, end.reasons) == ("stop", None, {"text": "stop"})
        assert (end.usage.prompt_tokens, end.usage.completion_tokens) == (2, 10)
        assert end.timings.admitted_s is not None
        assert end.timings.first_token_s is not None
        assert 0 < end.timings.admitted_s <= end.timings.first_token_s <= end.timings.finished_s
        await becomes_idle(engine)


async def test_generate_and_text_agree_with_the_stream() -> None:
    async with scripted_engine([HELLO]) as engine:
        result = await engine.generate(Request(prompt="Hi"))
        assert (result.text, result.reason, result.usage.total_tokens) == ("Hello you", "stop", 12)
        assert [piece async for piece in engine.text(Request(prompt="Hi"))] != []
        assert "".join([piece async for piece in engine.text(Request(prompt="Hi"))]) == "Hello you"


async def test_messages_go_through_the_chat_template() -> None:
    rendered = "user: Hi\n"
    async with scripted_engine([Script(byte_ids(rendered), [*byte_ids("yes"), EOS])]) as engine:
        result = await engine.generate(Request(messages=[{"role": "user", "content": "Hi"}]))
        assert result.text == "yes"
        assert result.usage.prompt_tokens == len(rendered)


async def test_several_answers_to_one_prompt() -> None:
    async with scripted_engine([HELLO]) as engine:
        for caching in (1, 2, 3):
            result = await engine.generate(Request(prompt="Hi", sampling=SamplingParams(n=caching)))
            assert [c.text for c in result.completions] == ["Hello you"] * caching
            assert [c.index for c in result.completions] == list(range(caching))
            assert result.usage.completion_tokens == 10 * caching
        await becomes_idle(engine)


async def test_siblings_share_the_prompt_and_differ_in_their_draws() -> None:
    async with scripted_engine() as engine:
        prompt = [(7 * i) % 250 for i in range(70)]
        request = Request(
            prompt_token_ids=prompt,
            sampling=SamplingParams(n=3, temperature=5.0, max_tokens=12, seed=1, ignore_eos=True),
        )
        result = await engine.generate(request)
        assert len({c.token_ids for c in result.completions}) > 1
        assert [c.finished.usage.cached_tokens for c in result.completions] == [0, 64, 64]
        assert (await engine.generate(request)).completions[2].token_ids == result.completions[2].token_ids


@pytest.mark.parametrize("max_tokens", [1, 2, 5])
async def test_length_limit(max_tokens: int) -> None:
    async with scripted_engine([ENDLESS]) as engine:
        result = await engine.generate(Request(prompt="go", sampling=SamplingParams(max_tokens=max_tokens)))
        assert (result.text, result.reason) == ("x" * max_tokens, "length")


async def test_prompts_at_the_limit() -> None:
    async with scripted_engine(max_model_len=64) as engine:
        sampling = SamplingParams(max_tokens=8, ignore_eos=True)

        async def ask(count: int) -> object:
            try:
                return await engine.generate(Request(prompt_token_ids=[5] * count, sampling=sampling))
            except PromptTooLong as error:
                return error

        results: dict[int, object] = {}

        async def note(count: int) -> None:
            results[count] = await ask(count)

        async with anyio.create_task_group() as group:
            for count in (62, 63, 64, 65, 1000, 3, 4):
                group.start_soon(note, count)
        for count, produced in ((62, 2), (63, 1), (3, 8), (4, 8)):
            result = results[count]
            assert not isinstance(result, Exception)
            assert len(result.token_ids) == produced
            assert result.reason == "length"
        for count in (64, 65, 1000):
            assert isinstance(results[count], PromptTooLong)
            assert str(count) in str(results[count])
            assert "64" in str(results[count])
        with pytest.raises(PromptTooLong, match="64"):
            await engine.generate(Request(prompt="y" * 1000))
        await becomes_idle(engine)


async def test_a_live_id_is_refused_and_free_after_the_end() -> None:
    async with scripted_engine([HELLO, ENDLESS]) as engine:
        async with engine.stream(Request(prompt="go", request_id="x")) as first:
            await anext(first)
            with pytest.raises(DuplicateRequest, match="'x'"):
                engine.stream(Request(prompt="Hi", request_id="x"))
            assert isinstance(await anext(first), TextDelta)
        assert (await engine.generate(Request(prompt="Hi", request_id="x"))).text == "Hello you"
        assert (await engine.generate(Request(prompt="Hi", request_id="x"))).text == "Hello you"


@pytest.mark.parametrize("prompt", ["", [], [-1], [300], [1, 2.5], ["a"], [True]])
async def test_bad_prompts_fail_alone(prompt: object) -> None:
    async with scripted_engine([HELLO, ENDLESS]) as engine, engine.stream(Request(prompt="go")) as neighbour:
        await anext(neighbour)
        request = Request(prompt=prompt) if isinstance(prompt, str) else Request(prompt_token_ids=prompt)  # type: ignore[arg-type]
        with anyio.fail_after(1), pytest.raises(RequestError):
            await engine.generate(request)
        assert isinstance(await anext(neighbour), TextDelta)


@pytest.mark.parametrize(
    "sampling",
    [
        {"logit_bias": {300: 1.0}},
        {"logit_bias": {307: 1.0}},
        {"stop_token_ids": [300]},
        {"allowed_token_ids": [5, 300]},
        {"logprobs": 301},
        {"prompt_logprobs": 301},
    ],
)
async def test_ids_outside_the_vocabulary_are_refused_in_the_call(sampling: dict[str, object]) -> None:
    async with scripted_engine([HELLO]) as engine:
        with pytest.raises(RequestError, match=r"30[017]"):
            engine.stream(Request(prompt="Hi", sampling=SamplingParams(**sampling)))  # type: ignore[arg-type]
        assert (await engine.generate(Request(prompt="Hi"))).text == "Hello you"


async def test_what_is_not_offered_is_refused() -> None:
    async with scripted_engine([HELLO]) as engine:
        with pytest.raises(RequestError, match="audio"):
            engine.stream(Request(prompt="Hi", outputs={"text", "audio"}))
        with pytest.raises(RequestError, match="talker"):
            engine.stream(Request(prompt="Hi", sampling={"talker": SamplingParams()}))
        with pytest.raises(RequestError, match="Request"):
            engine.stream("Hi")  # type: ignore[arg-type]
        result = await engine.generate(Request(prompt="Hi", sampling={"text": SamplingParams(max_tokens=2)}))
        assert result.text == "He"


async def test_without_a_tokenizer_ids_are_served() -> None:
    async with scripted_engine([HELLO], with_tokenizer=False) as engine:
        with pytest.raises(RequestError, match="tokenizer"):
            engine.stream(Request(prompt="Hi"))
        with pytest.raises(RequestError, match="tokenizer"):
            engine.stream(Request(prompt_token_ids=[1], sampling=SamplingParams(stop=["x"])))
        result = await engine.generate(Request(prompt_token_ids=byte_ids("Hi")))
        assert (result.text, result.token_ids) == ("", (*byte_ids("Hello you"), EOS))


async def test_a_full_queue_refuses_and_recovers() -> None:
    async with scripted_engine([HELLO, ENDLESS], max_slots=1, max_waiting=1) as engine:
        first, second = engine.stream(Request(prompt="go")), engine.stream(Request(prompt="go"))
        with pytest.raises(QueueFull, match="limit of 2"):
            engine.stream(Request(prompt="Hi"))
        await first.aclose()
        assert isinstance(await anext(second), TextDelta)
        await second.aclose()
        assert (await engine.generate(Request(prompt="Hi"))).text == "Hello you"


async def test_priorities_decide_who_waits() -> None:
    async with scripted_engine([HELLO, ENDLESS], max_slots=1) as engine:
        order: list[str] = []

        async def ask(name: str, priority: int) -> None:
            await engine.generate(Request(prompt="Hi", priority=priority))
            order.append(name)

        async with engine.stream(Request(prompt="go", priority=-5)) as busy:
            await anext(busy)
            async with anyio.create_task_group() as group:
                for name, priority in (("late", 2), ("soon", 0), ("now", -1)):
                    group.start_soon(ask, name, priority)
                with anyio.fail_after(5):
                    while engine.stats()["text"].waiting < 3:
                        await anyio.sleep(0.001)
                await busy.aclose()
        assert order == ["now", "soon", "late"]


async def test_a_better_priority_displaces_and_the_displaced_resumes_exactly() -> None:
    async with scripted_engine(max_slots=1) as engine:
        prompt = list(range(30))
        sampling = SamplingParams(max_tokens=60, temperature=3.0, seed=5, ignore_eos=True)
        alone = await engine.generate(Request(prompt_token_ids=prompt, sampling=sampling))
        async with engine.stream(Request(prompt_token_ids=prompt, sampling=sampling, priority=1)) as events:
            ids = list((await anext(events)).token_ids)  # type: ignore[union-attr]
            urgent = await engine.generate(Request(prompt_token_ids=[3], sampling=SamplingParams(max_tokens=3)))
            assert len(urgent.token_ids) == 3
            async for event in events:
                if isinstance(event, TextDelta):
                    ids += event.token_ids
        assert tuple(ids) == alone.token_ids


async def test_life_cycle_errors_say_what_to_do() -> None:
    engine = scripted_engine([HELLO])
    with pytest.raises(EngineNotStarted, match="async with"):
        engine.stream(Request(prompt="Hi"))
    async with engine:
        with pytest.raises(EngineStateError, match="once"):
            await engine.__aenter__()
        assert (await engine.generate(Request(prompt="Hi"))).text == "Hello you"
    with pytest.raises(EngineClosed, match="new one"):
        engine.stream(Request(prompt="Hi"))
    with pytest.raises(EngineClosed):
        engine.stats()
    await engine.aclose()


async def test_a_load_that_fails_raises_where_the_engine_is_entered(no_threads_left: None) -> None:
    with pytest.raises(OptionError, match="positions"):
        async with scripted_engine(max_model_len=100_000):
            pass
    with pytest.raises(OptionError, match="does not fit"):
        async with scripted_engine(max_model_len=512, num_blocks=2):
            pass

    def load(options: object) -> object:
        raise ZeroDivisionError("planted")

    with pytest.raises(ZeroDivisionError):
        async with Engine(load):  # type: ignore[arg-type]
            pass


async def test_one_reader_at_a_time() -> None:
    async with scripted_engine([ENDLESS]) as engine, engine.stream(Request(prompt="go")) as events:
        errors: list[Exception] = []

        async def read() -> None:
            try:
                for _ in range(3):
                    await anext(events)
            except EngineStateError as error:
                errors.append(error)

        async with anyio.create_task_group() as group:
            group.start_soon(read)
            group.start_soon(read)
        assert len(errors) == 1


async def test_abort_by_id_finishes_the_stream() -> None:
    async with scripted_engine([ENDLESS]) as engine, engine.stream(Request(prompt="go", request_id="x")) as events:
        await anext(events)
        assert engine.abort("x")
        seen = [event async for event in events]
        assert isinstance(seen[-1], Finished)
        assert seen[-1].reason == "abort"
        assert not engine.abort("x")
        await becomes_idle(engine)


async def test_a_tokenizer_with_more_tokens_than_the_model() -> None:
    model = ScriptedModel([HELLO], vocab_size=100)
    async with scripted_engine(model) as engine:
        with pytest.raises(RequestError, match="holds 0 to 99"):
            await engine.generate(Request(prompt="\xff"))
        await becomes_idle(engine)
