"""How long the engine holds a caller's event loop at a time."""

import asyncio
from collections.abc import Awaitable, Callable, Generator
from contextvars import Context
from dataclasses import dataclass, field
from time import perf_counter, thread_time
from typing import Any, Generic, TypeVar, TypeVarTuple, Unpack

from omni_async import Engine, Request

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


@dataclass(slots=True)
class Holds:
    """Each stretch during which the engine's code ran on the loop without a break."""

    wall_s: list[float] = field(default_factory=list)
    """Includes waiting for the interpreter lock and for a core."""
    cpu_s: list[float] = field(default_factory=list)
    """Time of this thread alone."""

    def measure(self, call: Callable[[], T]) -> T:
        """Run `call` and note how long it took."""
        cpu, wall = thread_time(), perf_counter()
        try:
            return call()
        finally:
            self.wall_s.append(perf_counter() - wall)
            self.cpu_s.append(thread_time() - cpu)


class MeasuredLoop(asyncio.SelectorEventLoop):
    """A loop that measures callbacks from other threads: here they are the engine's."""

    def __init__(self, holds: Holds) -> None:
        super().__init__()
        self._holds = holds

    def call_soon_threadsafe(
        self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """Schedule the callback with a clock around it."""

        def measured() -> None:
            self._holds.measure(lambda: callback(*args))

        return super().call_soon_threadsafe(measured, context=context)


class Measured(Generic[T]):
    """An awaitable whose every turn on the loop is measured."""

    def __init__(self, awaitable: Awaitable[T], holds: Holds) -> None:
        self._awaitable = awaitable
        self._holds = holds

    def __await__(self) -> Generator[Any, Any, T]:
        """Resume the inner awaitable with a clock around each turn."""
        inner = self._awaitable.__await__()
        while True:
            try:
                waited_for = self._holds.measure(lambda: next(inner))
            except StopIteration as end:
                result: T = end.value
                return result
            yield waited_for


async def read(engine: Engine, request: Request, holds: Holds, before_reading: Callable[[], None]) -> None:
    """Stream a request to its end, measuring the engine's part."""
    events = holds.measure(lambda: engine.stream(request))
    before_reading()
    try:
        while True:
            await Measured(events.__anext__(), holds)
    except StopAsyncIteration:
        await events.aclose()
