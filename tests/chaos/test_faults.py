"""Steps that fail, logits that are not numbers, engines that close: every caller gets an end or the cause."""

import asyncio
import signal

import anyio
import anyio.lowlevel
import pytest

from omni_async import (
    Engine,
    EngineClosed,
    NonFiniteLogits,
    OmniError,
    Request,
    SamplingParams,
    StepFailed,
    TextDelta,
)
from tests.support.engines import EOS, becomes_idle, byte_ids, scripted_engine
from tests.support.scripted import Script, ScriptedModel

pytestmark = pytest.mark.anyio

ENDLESS = Script(byte_ids("go"), byte_ids("x"))
HELLO = Script(byte_ids("Hi"), [*byte_ids("Hello you"), EOS])


async def outcome(engine: Engine, request: Request) -> object:
    try:
        return await engine.generate(request)
    except OmniError as error:
        return error


async def gather(engine: Engine, requests: list[Request]) -> list[object]:
    results: dict[int, object] = {}

    async def note(index: int, request: Request) -> None:
        results[index] = await outcome(engine, request)

    async with anyio.create_task_group() as group:
        for index, request in enumerate(requests):
            group.start_soon(note, index, request)
    return [results[index] for index in range(len(requests))]


@pytest.mark.parametrize("kind", [ValueError, MemoryError, asyncio.CancelledError, KeyboardInterrupt, StopIteration])
@pytest.mark.parametrize("pipelined", [True, False])
async def test_steps_that_fail_from_the_third_on(kind: type[BaseException], pipelined: bool) -> None:
    broken = [True]

    def on_step(step: int) -> None:
        if step >= 3 and broken[0]:
            raise kind("planted")

    model = ScriptedModel([HELLO, ENDLESS], on_step=on_step)
    async with scripted_engine(model, max_slots=4, pipelined=pipelined) as engine:
        with anyio.fail_after(2):
            results = await gather(engine, [Request(prompt="go")] * 6)
        for result in results:
            assert isinstance(result, StepFailed)
            assert isinstance(result.__cause__, kind)
            assert "planted" in str(result.__cause__)
        broken[0] = False
        assert (await engine.generate(Request(prompt="Hi"))).text == "Hello you"
        await becomes_idle(engine)


async def test_a_step_fails_only_the_requests_in_it() -> None:
    """The waiting ones run in later steps."""
    armed = [False]

    def on_step(step: int) -> None:
        if armed[0]:
            armed[0] = False
            raise ValueError("planted")

    model = ScriptedModel([HELLO, ENDLESS], on_step=on_step)
    async with scripted_engine(model, max_slots=4) as engine:
        running = [engine.stream(Request(prompt="go")) for _ in range(4)]
        for stream in running:
            await anext(stream)
        waiting = [engine.stream(Request(prompt="Hi")) for _ in range(2)]
        with anyio.fail_after(5):
            while engine.stats()["text"].waiting < 2:
                await anyio.sleep(0.001)
            armed[0] = True
            for stream in running:
                with pytest.raises(StepFailed):
                    async for _ in stream:
                        pass
            for stream in waiting:
                assert "".join([e.text async for e in stream if isinstance(e, TextDelta)]) == "Hello you"
        await becomes_idle(engine)


async def test_logits_that_are_not_numbers_end_the_one_request_that_has_them() -> None:
    bad = Script(byte_ids("bad"), byte_ids("abcdef"), nan_at=3)
    async with scripted_engine([HELLO, ENDLESS, bad]) as engine:
        results = await gather(engine, [Request(prompt="Hi"), Request(prompt="bad"), Request(prompt="Hi")])
        assert isinstance(results[1], NonFiniteLogits)
        assert results[0].text == results[2].text == "Hello you"  # type: ignore[attr-defined]
        got = ""
        with pytest.raises(NonFiniteLogits, match="6 tokens"):
            async for event in engine.stream(Request(prompt="bad")):
                assert isinstance(event, TextDelta)
                got += event.text
        assert got == "abc"
        await becomes_idle(engine)


async def test_a_failure_while_preparing_ends_that_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from omni_async.loading.loaded import TextTokenizer

    def encode(self: object, text: str) -> list[int]:
        raise MemoryError("planted")

    async with scripted_engine([HELLO]) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(TextTokenizer, "encode", encode)
            with pytest.raises(MemoryError, match="planted"):
                await engine.generate(Request(prompt="Hi"))
        assert (await engine.generate(Request(prompt="Hi"))).text == "Hello you"
        await becomes_idle(engine)


async def test_a_fault_of_the_engine_itself_ends_everything_with_its_cause(no_threads_left: None) -> None:
    async with scripted_engine([ENDLESS], max_slots=2) as engine:
        streams = [engine.stream(Request(prompt="go")) for _ in range(4)]
        await anext(streams[0])
        assert engine._stage is not None

        def plan() -> None:
            raise ZeroDivisionError("planted")

        engine._stage.scheduler.plan = plan  # type: ignore[method-assign, assignment]
        for stream in streams:
            with anyio.fail_after(2), pytest.raises(EngineClosed, match="planted") as caught:
                async for _ in stream:
                    pass
            assert isinstance(caught.value.__cause__, ZeroDivisionError)
        with pytest.raises(EngineClosed, match="planted"):
            engine.stream(Request(prompt="go"))


@pytest.mark.parametrize("reading", [True, False])
async def test_closing_with_work_in_flight(reading: bool, no_threads_left: None) -> None:
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    engine = scripted_engine([ENDLESS], max_slots=4, max_unread_tokens=64)
    ends: list[object] = []

    async def consume(request: Request) -> None:
        try:
            async for _ in engine.stream(request):
                pass
        except EngineClosed as error:
            ends.append(error)

    with anyio.fail_after(5):
        async with anyio.create_task_group() as group, engine:
            assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
            unread = engine.stream(Request(prompt="go"))
            if reading:
                for _ in range(8):
                    group.start_soon(consume, Request(prompt="go"))
                while engine.stats()["text"].requests < 9:
                    await anyio.sleep(0.001)
    await engine.aclose()
    assert len(ends) == (8 if reading else 0)
    with pytest.raises(EngineClosed):
        async for _ in unread:
            pass
    with pytest.raises(EngineClosed):
        engine.stream(Request(prompt="go"))
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers


async def test_leaving_the_engine_by_an_exception(no_threads_left: None) -> None:
    with pytest.raises(ZeroDivisionError):
        async with scripted_engine([ENDLESS]) as engine:
            await anext(engine.stream(Request(prompt="go")))
            raise ZeroDivisionError


async def test_cancelled_while_it_loads(no_threads_left: None) -> None:
    import threading

    loading, go_on = threading.Event(), threading.Event()
    engine = scripted_engine([HELLO])
    load = engine._load

    def slow(options: object) -> object:
        loading.set()
        go_on.wait(5)
        return load(options)  # type: ignore[arg-type]

    engine._load = slow  # type: ignore[assignment]
    with anyio.move_on_after(0.05) as scope:
        async with engine:
            raise AssertionError("not reached")
    assert scope.cancelled_caught
    assert loading.is_set()
    go_on.set()
    with anyio.fail_after(5):
        await engine.aclose()


async def test_submitting_while_closing_always_ends() -> None:
    for _ in range(20):
        engine = scripted_engine([ENDLESS, HELLO])
        outcomes: list[str] = []

        async def submit(engine: Engine = engine, outcomes: list[str] = outcomes) -> None:
            for _ in range(50):
                try:
                    await engine.generate(Request(prompt="Hi", sampling=SamplingParams(max_tokens=1)))
                except EngineClosed:
                    outcomes.append("closed")
                    return

        with anyio.fail_after(5):
            async with anyio.create_task_group() as group, engine:
                for _ in range(3):
                    group.start_soon(submit)
                await anyio.lowlevel.checkpoint()
