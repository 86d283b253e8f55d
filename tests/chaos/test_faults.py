"""Steps that fail, logits that are not numbers, engines that close: every caller gets an end or the cause."""

import asyncio
import signal
import subprocess
import sys

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
from tests.support.gate import Gate, all_submitted
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
        with anyio.fail_after(5):
            results = await gather(engine, [Request(prompt="go")] * 6)
        for result in results:
            assert isinstance(result, StepFailed)
            assert isinstance(result.__cause__, kind)
            assert "planted" in str(result.__cause__)
        with anyio.fail_after(5):  # as long as the fault lasts, what comes new fails with it at once
            late = await outcome(engine, Request(prompt="Hi"))
        assert isinstance(late, StepFailed)
        assert "planted" in str(late.__cause__)
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

    def encode(self: object, text: str, *_: object) -> list[int]:
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
            with anyio.fail_after(5), pytest.raises(EngineClosed, match="planted") as caught:
                async for _ in stream:
                    pass
            assert isinstance(caught.value.__cause__, ZeroDivisionError)
        with pytest.raises(EngineClosed, match="planted"):
            engine.stream(Request(prompt="go"))


async def test_closing_with_work_in_flight(no_threads_left: None) -> None:
    """Four run, one is not read, and four wait, when a step is held and the engine is left."""
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    gate = Gate(at=3)
    model = ScriptedModel([ENDLESS], on_step=gate)
    engine = scripted_engine(model, max_slots=5)
    ends: list[EngineClosed] = []

    async def consume() -> None:
        try:
            async for _ in engine.stream(Request(prompt="go")):
                pass
        except EngineClosed as error:
            ends.append(error)

    with anyio.fail_after(5):
        async with anyio.create_task_group() as group, engine:
            assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
            unread = engine.stream(Request(prompt="go"))
            for _ in range(8):
                group.start_soon(consume)
            await gate.closed()
            await all_submitted(engine, 9)
            gate.open()  # and closed before anything else can happen on this thread
        assert len(ends) == 8
        with pytest.raises(EngineClosed):
            async for _ in unread:
                pass
        await engine.aclose()
    with pytest.raises(EngineClosed):
        engine.stream(Request(prompt="go"))
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers


async def test_closing_with_an_unread_request_alone(no_threads_left: None) -> None:
    async with scripted_engine([ENDLESS], max_unread_tokens=4) as engine:
        unread = engine.stream(Request(prompt="go"))
        with anyio.fail_after(5):
            while not engine.stats()["text"].held:
                await anyio.sleep(0.001)
    with anyio.fail_after(5), pytest.raises(EngineClosed):
        async for _ in unread:
            pass


# A shell's background job is started with SIGINT ignored, and so would be this program if the tests are run in one.
HOST_PROGRAM = """
import asyncio, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from omni_async import Request
from tests.support.engines import byte_ids, scripted_engine
from tests.support.scripted import Script, ScriptedModel

async def main():
    model = ScriptedModel([Script(byte_ids("go"), byte_ids("x"))], max_positions=100_000)
    async with scripted_engine(model, num_blocks=6000, prefix_caching=False) as engine:
        async for _ in engine.stream(Request(prompt="go")):
            print("running", flush=True)

try:
    asyncio.run(main())
except KeyboardInterrupt:
    print("interrupted", flush=True)
    sys.exit(7)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT")
def test_the_hosts_own_interrupt_and_exit_code() -> None:
    """Ctrl-C in a program that streams: its own handler decides, and nothing of the engine keeps it from ending."""
    with subprocess.Popen(
        [sys.executable, "-c", HOST_PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as host:
        try:
            assert host.stdout is not None
            assert host.stdout.readline() == "running\n"
            host.send_signal(signal.SIGINT)
            out, err = host.communicate(timeout=20)
        finally:
            host.kill()
    assert host.returncode == 7, err
    assert out.splitlines()[-1] == "interrupted"
    assert "Traceback" not in err


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
        go_on.wait(20)
        return load(options)  # type: ignore[arg-type]

    engine._load = slow  # type: ignore[assignment]

    async def enter() -> None:
        async with engine:
            raise AssertionError("not reached")

    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            group.start_soon(enter)
            while not loading.is_set():
                await anyio.sleep(0.001)
            group.cancel_scope.cancel()
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
