"""The lane of a stage: device work in the order of its launch, beside the loop that plans it."""

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Protocol, TypeVar

T = TypeVar("T")


class Lane(Protocol):
    """Runs closures one after another, away from the event loop."""

    def start(self) -> None:
        """Be ready for work."""
        ...

    def run(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Queue `work`; its exception, of any kind, becomes the future's."""
        ...

    async def stop(self) -> None:
        """Return when all queued work is done."""
        ...


class ThreadLane:
    """A lane for the CPU: one thread. Torch releases the interpreter lock inside its operations."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._loop = asyncio.get_running_loop()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def run(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Queue `work` for the thread."""
        future: asyncio.Future[T] = self._loop.create_future()

        def job() -> None:
            try:
                result = work()
            except BaseException as error:  # whatever it is, it belongs to this piece of work
                self._loop.call_soon_threadsafe(_fail, future, error)
            else:
                self._loop.call_soon_threadsafe(_succeed, future, result)

        self._queue.put(job)
        return future

    async def stop(self) -> None:
        """Let the thread finish its queue and end."""
        self._queue.put(None)
        await self._loop.run_in_executor(None, self._thread.join)

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            job()


def _succeed(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[T], error: BaseException) -> None:
    if not future.done():
        # A future refuses StopIteration; nothing here raises it on purpose, so it is wrapped.
        future.set_exception(RuntimeError(repr(error)) if isinstance(error, StopIteration) else error)
