"""However a caller leaves, no step is planned for it any more, nothing of it stays in memory, and nobody complains."""

import gc
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import pytest
from torch import Tensor

from omni_async import Engine, EngineStateError, EventStream, Request, SamplingParams
from omni_async.mailbox import Mailbox, Outlet
from omni_async.scheduler.sequence import Sequence
from omni_async.stage import ActiveRequest
from tests.support.engines import EOS, becomes_idle, byte_ids, scripted_engine
from tests.support.gate import Gate
from tests.support.scripted import Script, ScriptedModel

pytestmark = pytest.mark.anyio

ENDLESS = Script(byte_ids("go"), byte_ids("x"))
HELLO = Script(byte_ids("Hi"), [*byte_ids("Hello you"), EOS])

# -- while a step is held ----------------------------------------------------------------------------------------------


async def break_then_close(engine: Engine, gate: Gate) -> None:
    async with engine.stream(Request(prompt="go")) as events:
        async for _ in events:
            break
        await gate.closed()


async def cancel_between_items(engine: Engine, gate: Gate) -> None:
    async def consume() -> None:
        async with engine.stream(Request(prompt="go")) as events:
            async for _ in events:
                await anyio.sleep_forever()

    await cancel_at_the_gate(consume, gate)


async def cancel_in_an_item(engine: Engine, gate: Gate) -> None:
    async def consume() -> None:
        async for _ in engine.stream(Request(prompt="go")):
            pass  # at the gate, all has been read

    await cancel_at_the_gate(consume, gate)


async def cancel_at_the_gate(consume: Callable[[], Awaitable[None]], gate: Gate) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(consume)
        await gate.closed()
        await anyio.wait_all_tasks_blocked()
        group.cancel_scope.cancel()


async def time_out(engine: Engine, gate: Gate) -> None:
    with pytest.raises(TimeoutError), anyio.fail_after(0.05):
        await engine.generate(Request(prompt="go"))
    await gate.closed()


async def drop_the_last_reference(engine: Engine, gate: Gate) -> None:
    events = engine.stream(Request(prompt="go"))
    await anext(events)
    await gate.closed()
    del events
    gc.collect()


async def abort_by_id(engine: Engine, gate: Gate) -> None:
    events = engine.stream(Request(prompt="go"))
    await gate.closed()
    assert engine.abort(events.request_id)


WAYS = [break_then_close, cancel_between_items, cancel_in_an_item, time_out, drop_the_last_reference, abort_by_id]


@pytest.mark.parametrize("leave", WAYS, ids=lambda way: way.__name__)
async def test_no_step_is_planned_after_leaving(
    leave: Callable[[Engine, Gate], Awaitable[None]], caplog: pytest.LogCaptureFixture
) -> None:
    """The third step is held while the caller leaves; the fourth may have been launched ahead, a fifth may not."""
    gate = Gate(at=3)
    model = ScriptedModel([HELLO, ENDLESS], on_step=gate)
    async with scripted_engine(model) as engine:
        await leave(engine, gate)
        gate.open()
        await becomes_idle(engine, seconds=1)
        assert model.num_steps in (3, 4)
        assert not engine._live
        assert (await engine.generate(Request(prompt="Hi"))).text == "Hello you"
        await becomes_idle(engine)
    gc.collect()
    assert [record.getMessage() for record in caplog.records] == []


async def test_a_cancelled_read_ends_the_request_and_says_so_later() -> None:
    """Even if the stream itself is kept: what follows is an error, not an answer that looks complete."""
    gate = Gate(at=3)
    async with scripted_engine(ScriptedModel([HELLO, ENDLESS], on_step=gate)) as engine:
        events = engine.stream(Request(prompt="go", request_id="x"))
        with anyio.move_on_after(0.05) as scope:
            async for _ in events:
                pass
        assert scope.cancelled_caught
        gate.open()
        await becomes_idle(engine, seconds=1)
        with pytest.raises(EngineStateError, match="'x' ended when a read of it was cancelled"):
            await anext(events)
        await events.aclose()


# -- nothing stays -----------------------------------------------------------------------------------------------------


def live_objects() -> Counter[type]:
    """Everything that belongs to one request, wherever it is held."""
    gc.collect()
    kinds = (Mailbox, Outlet, Sequence, ActiveRequest, EventStream, Tensor)
    return Counter(kind for found in gc.get_objects() if (kind := type(found)) in kinds)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # the others' ways of leaving are above
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
async def test_requests_that_left_at_random_points_leave_nothing() -> None:
    rng = random.Random(1)
    before = live_objects()
    tensors: list[int] = []
    memory: list[int] = []
    # Many waiting, long prompts in chunks, few blocks: so they leave from every state.
    options = {"max_slots": 6, "num_blocks": 40, "max_waiting": 1000, "max_step_tokens": 16, "max_unread_tokens": 16}
    async with scripted_engine(ScriptedModel(vocab_size=256), **options) as engine:  # type: ignore[arg-type]

        async def one(ways: str, steps: int) -> None:
            length = rng.randrange(1, 40)
            sampling = SamplingParams(
                max_tokens=rng.randrange(1, 20), n=rng.choice([1, 1, 2]), stop="\xff", logit_bias={5: 1.0}, logprobs=0
            )
            ids = [rng.randrange(250) for _ in range(length)]
            events = engine.stream(Request(prompt_token_ids=ids, sampling=sampling))
            if ways == "at once":
                await events.aclose()
            elif ways == "dropped":
                del events
            elif ways == "after some checkpoints":
                for _ in range(steps):
                    await anyio.lowlevel.checkpoint()
                engine.abort(events.request_id)
                engine.abort("unknown")
                async for _ in events:
                    pass
            else:
                async for _ in events:
                    steps -= 1
                    if steps < 0 and ways == "break":
                        break
                if ways == "after the end":
                    assert not engine.abort(events.request_id)
                    await events.aclose()

        for _ in range(3):
            async with anyio.create_task_group() as group:
                for _ in range(500):
                    ways = rng.choice(["at once", "dropped", "after some checkpoints", "break", "after the end"])
                    group.start_soon(one, ways, rng.randrange(12))
            await becomes_idle(engine, seconds=20)
            left = live_objects() - before
            assert not left[EventStream]
            assert left.total() - left[Tensor] <= 4 * 6  # what the last step's plan names
            assert not engine._live
            tensors.append(left[Tensor])
            memory.append(resident_bytes())
        assert tensors[2] <= tensors[0]
        assert memory[2] <= memory[0] * 1.05
