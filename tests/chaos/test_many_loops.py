"""One engine, many threads and event loops of several kinds at once; and none of them is blocked by it."""

import asyncio
import threading

import anyio
import pytest
import trio
import uvloop
from blockbuster import blockbuster_ctx

from omni_async import EngineStateError, Request, SamplingParams
from tests.support.engines import EOS, becomes_idle, byte_ids, scripted_engine
from tests.support.scripted import Script

HELLO = Script(byte_ids("Hi"), [*byte_ids("Hello you"), EOS])


def test_callers_on_every_kind_of_loop_at_once() -> None:
    texts: list[str] = []

    async def main() -> None:
        async with scripted_engine([HELLO]) as engine:

            async def ask() -> None:
                texts.extend([(await engine.generate(Request(prompt="Hi"))).text for _ in range(5)])

            async def many() -> None:
                async with anyio.create_task_group() as group:
                    for _ in range(3):
                        group.start_soon(ask)

            threads = [
                threading.Thread(target=lambda: asyncio.run(many())),
                threading.Thread(target=lambda: uvloop.run(many())),
                threading.Thread(target=lambda: trio.run(many)),
            ]
            for thread in threads:
                thread.start()
            await many()
            for thread in threads:
                await asyncio.to_thread(thread.join)
            await becomes_idle(engine)

    asyncio.run(main())
    assert texts == ["Hello you"] * 60


@pytest.mark.anyio
async def test_nothing_blocks_the_callers_loop() -> None:
    """Calls that would block an event loop raise here, on the caller's loop and on the engine's own."""
    async with scripted_engine([HELLO]) as engine:
        with blockbuster_ctx():
            for _ in range(3):
                request = Request(prompt="Hi", sampling=SamplingParams(n=2, logprobs=1))
                assert (await engine.generate(request)).text == "Hello you"
            async with engine.stream(Request(prompt="Hi")) as events:
                await anext(events)
        await becomes_idle(engine)


def test_reading_without_an_event_loop_says_so() -> None:
    async def main() -> None:
        async with scripted_engine([HELLO]) as engine:
            events = engine.stream(Request(prompt="Hi"))
            errors: list[BaseException] = []

            def read() -> None:
                step = events.__anext__()
                try:
                    step.send(None)
                except BaseException as error:
                    errors.append(error)
                step.close()

            thread = threading.Thread(target=read)
            thread.start()
            await asyncio.to_thread(thread.join)
            assert len(errors) == 1
            assert isinstance(errors[0], EngineStateError | RuntimeError)

    asyncio.run(main())
