"""The lane of a stage: device work in the order of its launch, beside the loop that plans it."""

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

T = TypeVar("T")

HostArrays = tuple[NDArray[Any], ...]


class Lane(Protocol):
    """Runs work one piece after another and brings its results back, away from the event loop.

    A piece of work is launched by a closure, which returns another one that reads the result on the host once the
    device has come to its end. `aside`, `send` and `download` are for the launching closure.
    """

    def start(self) -> None:
        """Be ready for work."""
        ...

    def run(self, launch: Callable[[], Callable[[], T]]) -> asyncio.Future[T]:
        """Launch a piece of work; an exception of either closure, or of the device, becomes the future's."""
        ...

    def aside(self) -> AbstractContextManager[object]:
        """What is done in this context may overlap with earlier work, and comes before what the launch does next."""
        ...

    def send(self, array: NDArray[np.int32], into: Tensor | None = None) -> Tensor:
        """A copy of a host array on the device, in the memory of `into` if that is given."""
        ...

    def download(self, tensors: Sequence[Tensor]) -> Callable[[], HostArrays]:
        """Copy tensors to the host behind what has been launched.

        The closure returned is for the one that reads the work's result; what it gives is to be copied there.
        """
        ...

    def span(self, phase: str) -> AbstractContextManager[object]:
        """Mark what is done in this context in the profiles that the device's tools make."""
        ...

    async def stop(self) -> None:
        """Return when all work is done."""
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

    def run(self, launch: Callable[[], Callable[[], T]]) -> asyncio.Future[T]:
        """Queue the work for the thread."""
        future: asyncio.Future[T] = self._loop.create_future()

        def job() -> None:
            deliver(self._loop, future, lambda: launch()())

        self._queue.put(job)
        return future

    def aside(self) -> AbstractContextManager[object]:
        """Nothing overlaps here."""
        return nullcontext()

    def send(self, array: NDArray[np.int32], into: Tensor | None = None) -> Tensor:
        """The array itself; there are no graphs here that would read elsewhere."""
        return torch.from_numpy(array) if into is None else into.copy_(torch.from_numpy(array))

    def download(self, tensors: Sequence[Tensor]) -> Callable[[], HostArrays]:
        """The tensors themselves."""
        arrays = tuple(tensor.numpy() for tensor in tensors)
        return lambda: arrays

    def span(self, phase: str) -> AbstractContextManager[object]:
        """Profilers of the CPU see functions as they are."""
        return nullcontext()

    async def stop(self) -> None:
        """Let the thread finish its queue and end."""
        self._queue.put(None)
        await self._loop.run_in_executor(None, self._thread.join)

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            job()


def deliver(loop: asyncio.AbstractEventLoop, future: "asyncio.Future[T]", finish: Callable[[], T]) -> None:
    """Give `future`, which belongs to `loop`, the result of `finish` or its exception. For another thread."""
    try:
        result = finish()
    except BaseException as error:  # whatever it is, it belongs to this piece of work
        loop.call_soon_threadsafe(fail, future, error)
    else:
        loop.call_soon_threadsafe(_succeed, future, result)


def fail(future: "asyncio.Future[T]", error: BaseException) -> None:
    """Give `future` an exception, unless it has ended. On its loop."""
    if not future.done():
        # A future refuses StopIteration; nothing here raises it on purpose, so it is wrapped.
        future.set_exception(RuntimeError(repr(error)) if isinstance(error, StopIteration) else error)


def _succeed(future: "asyncio.Future[T]", result: T) -> None:
    if not future.done():
        future.set_result(result)
