"""Callers who change what they gave, close what others read, fork, and ask for what cannot be."""

import os
import warnings

import anyio
import anyio.to_thread
import pytest

from omni_async import Engine, EngineStateError, LoadError, OptionError, Request, SamplingParams
from omni_async.errors import RequestError
from tests.support.engines import EOS, becomes_idle, byte_ids, scripted_engine
from tests.support.gate import Gate
from tests.support.scripted import Script, ScriptedModel

pytestmark = pytest.mark.anyio

HELLO = Script(byte_ids("Hi"), [*byte_ids("Hello you"), EOS])


async def test_lists_that_change_after_the_request_was_made() -> None:
    ids = byte_ids("Hi")
    turn = {"role": "user", "content": "x"}
    messages = [turn]
    by_ids, by_turns = Request(prompt_token_ids=ids), Request(messages=messages, sampling=SamplingParams(max_tokens=1))
    async with scripted_engine([HELLO]) as engine:
        before = await engine.generate(by_turns)
        ids.clear()
        messages.append({"role": "user", "content": "more"})
        turn["content"] = "something else"
        assert (await engine.generate(by_ids)).text == "Hello you"
        assert (await engine.generate(by_turns)).usage.prompt_tokens == before.usage.prompt_tokens


async def test_closing_a_stream_that_another_task_reads_ends_that_task_at_once() -> None:
    """The engine is in the middle of a step and cannot help."""
    gate = Gate(at=1)
    async with scripted_engine(ScriptedModel([HELLO], on_step=gate)) as engine:
        events = engine.stream(Request(prompt="Hi"))
        got: list[object] = []

        async def read() -> None:
            async for event in events:
                got.append(event)

        try:
            with anyio.fail_after(5):
                async with anyio.create_task_group() as group:
                    group.start_soon(read)
                    await gate.closed()
                    await anyio.wait_all_tasks_blocked()
                    await events.aclose()
        finally:
            gate.open()
        assert not got
        await becomes_idle(engine)


async def test_a_minimum_length_when_every_token_is_a_stop() -> None:
    every = SamplingParams(stop_token_ids=range(300), min_tokens=1)
    allowed = SamplingParams(stop_token_ids=[5, 6], allowed_token_ids=[6, 5], min_tokens=1)
    async with scripted_engine([HELLO]) as engine:
        for params in (every, allowed):
            with pytest.raises(RequestError, match="min_tokens is 1"):
                await engine.generate(Request(prompt="Hi", sampling=params))
        await becomes_idle(engine)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
async def test_a_forked_process_is_told_that_the_engine_is_not_there() -> None:
    async with scripted_engine([HELLO]) as engine:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads is what is tested
            child = os.fork()
        if not child:
            code = 1
            try:
                engine.stream(Request(prompt="Hi"))
            except EngineStateError as error:
                code = 7 if "fork" in str(error) else 2
            finally:
                os._exit(code)
        _, status = await anyio.to_thread.run_sync(os.waitpid, child, 0)
        assert os.waitstatus_to_exitcode(status) == 7
        assert (await engine.generate(Request(prompt="Hi"))).text == "Hello you"


@pytest.mark.parametrize("path", ["~nobody-of-this-name/model", "x" * 5000, "/" + "x" * 5000, "\0", "/dev/null", ""])
async def test_paths_that_cannot_be(path: str) -> None:
    with pytest.raises(LoadError):
        await Engine.from_pretrained(path, device="cpu").__aenter__()


@pytest.mark.parametrize("path", [None, 5, b"model", ["model"]])
async def test_what_is_no_path(path: object) -> None:
    with pytest.raises(OptionError, match="path"):
        Engine.from_pretrained(path)  # type: ignore[arg-type]
