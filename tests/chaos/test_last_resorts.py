"""What must hold when even the means of ending things fail."""

from collections.abc import Callable

import anyio
import pytest

from omni_async import EngineClosed, Request
from omni_async.scheduler.scheduler import Limits, Scheduler
from omni_async.stage import Stage
from tests.support.engines import byte_ids, scripted_engine
from tests.support.scripted import Script

ENDLESS = Script(byte_ids("go"), byte_ids("x"))


@pytest.mark.anyio
async def test_a_scheduler_that_cannot_even_end_sequences_hangs_nobody(no_threads_left: None) -> None:
    async with scripted_engine([ENDLESS], max_slots=2) as engine:
        streams = [engine.stream(Request(prompt="go")) for _ in range(4)]
        await anext(streams[0])
        assert engine._stage is not None

        def broken(*_: object) -> None:
            raise ZeroDivisionError("planted")

        engine._stage.scheduler.end = broken  # type: ignore[method-assign]
        engine._stage.scheduler.plan = broken  # type: ignore[method-assign, assignment]
        for stream in streams:
            with anyio.fail_after(2), pytest.raises(EngineClosed, match="planted"):
                async for _ in stream:
                    pass


@pytest.mark.anyio
async def test_an_engine_that_was_closed_before_it_was_entered_does_not_load() -> None:
    engine = scripted_engine([ENDLESS])
    await engine.aclose()
    with pytest.raises(EngineClosed):
        await engine.__aenter__()


class InterruptedLoop:
    """Takes wake-ups, but for those amid which a signal arrives."""

    def __init__(self) -> None:
        self.interrupted = True
        self.posted = 0

    def call_soon_threadsafe(self, callback: Callable[[], object]) -> None:
        if self.interrupted:
            raise KeyboardInterrupt
        self.posted += 1


@pytest.mark.asyncio
async def test_a_wake_up_that_a_signal_cuts_short_silences_none_after_it() -> None:
    scheduler = Scheduler(Limits(num_slots=1, num_blocks=1, block_size=1, max_step_tokens=1, prefix_caching=False))
    stage = Stage(scheduler, runner=None, pipelined=True, on_end=lambda mailbox: None)  # type: ignore[arg-type]
    loop = stage._loop = InterruptedLoop()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        stage.wake()
    loop.interrupted = False
    stage.wake()
    assert loop.posted == 1


@pytest.mark.anyio
async def test_a_thread_that_gets_no_event_loop_is_an_error_of_entering(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_loop() -> object:
        raise ImportError("planted")

    monkeypatch.setattr("omni_async.host._new_event_loop", no_loop)
    engine = scripted_engine([ENDLESS])
    with anyio.fail_after(2):
        with pytest.raises(ImportError, match="planted"):
            await engine.__aenter__()
        await engine.aclose()
