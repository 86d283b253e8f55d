"""What must hold when even the means of ending things fail."""

import gc
import threading
from collections.abc import Callable

import anyio
import pytest

from omni_async import EngineClosed, EngineOptions, Request
from omni_async.live import LiveRequests
from omni_async.mailbox import Mailbox
from omni_async.scheduler.scheduler import Limits, Scheduler
from omni_async.stage import Stage
from tests.support.engines import EOS, byte_ids, scripted_engine
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
    stage = Stage(scheduler, runner=None, output="text", pipelined=True, on_end=lambda mailbox: None)  # type: ignore[arg-type]
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


class CollectingId(str):
    """A request id in whose comparison the garbage collector runs."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        gc.collect()
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def test_a_reader_that_is_collected_while_requests_are_counted_blocks_nobody() -> None:
    """Its `async with` ends on the thread that collects it, perhaps one that has just taken the lock."""
    live = LiveRequests(EngineOptions())
    live.add(Mailbox("a", 0, 0.0, 1, 1))
    left = Mailbox("left", 1, 0.0, 1, 1)
    live.add(left)

    class Reader:
        def __init__(self) -> None:
            self.cycle = self

        def __del__(self) -> None:
            live.remove(left)

    def work() -> None:
        Reader()
        live.remove(Mailbox(CollectingId("a"), 2, 0.0, 1, 1))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(5)
    assert not thread.is_alive()
    assert live.find("left") is None
    assert (len(live), live.num_answers) == (1, 1)


@pytest.mark.anyio
async def test_a_fault_amid_publishing_hangs_nobody_whose_request_has_just_ended() -> None:
    script = Script(byte_ids("Hi"), [*byte_ids("Hello you"), EOS])
    async with scripted_engine([script]) as engine:
        assert engine._stage is not None
        scheduler = engine._stage.scheduler
        inner: Callable[[object], list[object]] = scheduler.commit  # type: ignore[assignment]

        def commit(output: object) -> list[object]:
            updates = inner(output)
            ends = any(update.reason for update in updates)  # type: ignore[attr-defined]
            return [*updates, None] if ends else updates

        scheduler.commit = commit  # type: ignore[method-assign, assignment]
        with anyio.fail_after(2):
            assert (await engine.generate(Request(prompt="Hi"))).text == "Hello you"
        with pytest.raises(EngineClosed, match="stopped on a fault"):
            await engine.generate(Request(prompt="Hi"))
