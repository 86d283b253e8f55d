"""However a caller leaves a stream, the request ends at once and everywhere."""

import asyncio
import gc
import threading

import anyio
import pytest

from omni_async import DeadlineExceeded, Engine, Request, TextDelta
from tests.support.engines import EOS, becomes_idle, byte_ids, scripted_engine
from tests.support.scripted import Script, ScriptedModel

pytestmark = pytest.mark.anyio

ENDLESS = Script(byte_ids("go"), byte_ids("x"))
HELLO = Script(byte_ids("Hi"), [*byte_ids("Hello you"), EOS])


async def check_alive(engine: Engine) -> None:
    await becomes_idle(engine)
    assert (await engine.generate(Request(prompt="Hi"))).text == "Hello you"
    await becomes_idle(engine)


async def test_break_inside_async_with() -> None:
    async with scripted_engine([HELLO, ENDLESS]) as engine:
        async with engine.stream(Request(prompt="go")) as events:
            async for _ in events:
                break
        await check_alive(engine)


async def test_break_without_async_with_ends_by_collection() -> None:
    async with scripted_engine([HELLO, ENDLESS]) as engine:
        async for _ in engine.stream(Request(prompt="go")):
            break
        gc.collect()
        await check_alive(engine)


async def test_dropping_the_last_reference() -> None:
    async with scripted_engine([HELLO, ENDLESS]) as engine:
        events = engine.stream(Request(prompt="go"))
        await anext(events)
        del events
        gc.collect()
        never_read = engine.stream(Request(prompt="go"))
        del never_read
        gc.collect()
        await check_alive(engine)


@pytest.mark.parametrize("where", ["sleeping", "waiting"])
async def test_cancelled_task(where: str) -> None:
    async with scripted_engine([HELLO, ENDLESS]) as engine:
        started = anyio.Event()

        async def consume() -> None:
            async with engine.stream(Request(prompt="go")) as events:
                async for _ in events:
                    started.set()
                    if where == "sleeping":
                        await anyio.sleep(60)

        async with anyio.create_task_group() as group:
            group.start_soon(consume)
            await started.wait()
            group.cancel_scope.cancel()
        await check_alive(engine)


async def test_exception_in_the_body() -> None:
    async with scripted_engine([HELLO, ENDLESS]) as engine:
        with pytest.raises(ZeroDivisionError):
            async with engine.stream(Request(prompt="go")) as events:
                await anext(events)
                raise ZeroDivisionError
        await check_alive(engine)


async def test_a_closed_stream_yields_nothing_more() -> None:
    async with scripted_engine([HELLO, ENDLESS]) as engine:
        events = engine.stream(Request(prompt="go"))
        await anext(events)
        await events.aclose()
        await events.aclose()
        assert [event async for event in events] == []
        await check_alive(engine)


async def test_deadline() -> None:
    # Longer than any deadline here on any machine.
    model = ScriptedModel([HELLO, ENDLESS], max_positions=100_000)
    async with scripted_engine(model, max_slots=1, num_blocks=6250, max_unread_tokens=100_000) as engine:
        with anyio.fail_after(5), pytest.raises(DeadlineExceeded, match=r"0\.05"):
            await engine.generate(Request(prompt="go", deadline_s=0.05))
        async with engine.stream(Request(prompt="go")) as busy:
            await anext(busy)
            with anyio.fail_after(5), pytest.raises(DeadlineExceeded):  # passes while it waits for a slot
                await engine.generate(Request(prompt="Hi", deadline_s=0.05))
        assert (await engine.generate(Request(prompt="Hi", deadline_s=60))).text == "Hello you"
        await check_alive(engine)


async def test_deadline_of_a_request_that_nobody_reads() -> None:
    async with scripted_engine([HELLO, ENDLESS], max_unread_tokens=3) as engine:
        events = engine.stream(Request(prompt="go", deadline_s=0.1))
        await becomes_idle_after_holding(engine)
        with pytest.raises(DeadlineExceeded):
            async for event in events:
                assert isinstance(event, TextDelta)
        await check_alive(engine)


async def becomes_idle_after_holding(engine: Engine) -> None:
    with anyio.fail_after(5):
        while not engine.stats()["text"].held:
            await anyio.sleep(0.001)
    await becomes_idle(engine)


def test_a_callers_loop_that_closes_ends_its_requests() -> None:
    """The loop of one caller ends while its task waits; the engine, on another loop, notices."""
    release = threading.Event()
    model_waits = [False]

    async def main() -> None:
        def on_step(step: int) -> None:
            if model_waits[0]:
                release.wait(5)

        model = ScriptedModel([HELLO, ENDLESS], on_step=on_step)
        async with scripted_engine(model) as engine:

            def caller() -> None:
                loop = asyncio.new_event_loop()
                events = engine.stream(Request(prompt="go"))

                async def read() -> None:
                    async for _ in events:
                        pass

                task = loop.create_task(read())
                for _ in range(5):
                    loop.run_until_complete(asyncio.sleep(0.001))
                model_waits[0] = True
                while engine_waiter(events) is None:
                    loop.run_until_complete(asyncio.sleep(0.001))
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                loop.close()
                kept.append((events, task))

            kept: list[object] = []
            thread = threading.Thread(target=caller)
            thread.start()
            await asyncio.to_thread(thread.join)
            model_waits[0] = False
            release.set()
            await check_alive(engine)
            kept.clear()

    def engine_waiter(events: object) -> object:
        return events._mailbox.waiter  # type: ignore[attr-defined]

    asyncio.run(main())
