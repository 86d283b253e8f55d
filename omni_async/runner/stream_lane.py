"""The lane of a CUDA device: a stream for computing, one for copying in, and a thread that waits for results."""

import asyncio
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from omni_async.runner.lane import HostArrays, deliver, fail

T = TypeVar("T")

Job = Callable[[], None]

SMALL = 2**16
"""Bytes of a pinned buffer that is used again and again."""


class StreamLane:
    """A lane for CUDA. Launching never waits for the device, so it is done on the loop itself.

    Results are copied on the computing stream: they are a few bytes, and a third stream would need a copy of them
    first, since the next replay of a graph overwrites them.
    """

    def __init__(self, name: str, stage: str, device: torch.device) -> None:
        self._stage = stage
        self._device = device
        self.compute = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._copy_in = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._buffers: deque[Tensor] = deque()
        self._borrowed: list[Tensor] = []
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._loop = asyncio.get_running_loop()

    def start(self) -> None:
        """Start the thread that waits for results."""
        self._thread.start()

    def run(self, launch: Callable[[], Callable[[], T]]) -> asyncio.Future[T]:
        """Launch the work now; the thread waits for its end."""
        future: asyncio.Future[T] = self._loop.create_future()
        borrowed = self._borrowed = []
        try:
            torch.cuda.set_stream(self.compute)
            finish = launch()
            # A blocking event lets the thread sleep; otherwise it would occupy a core while it waits.
            end = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            end.record(self.compute)
        except BaseException as error:  # whatever it is, it belongs to this piece of work
            fail(future, error)
            return future

        def wait() -> T:
            end.synchronize()
            result = finish()
            self._buffers.extend(borrowed)
            return result

        self._queue.put(lambda: deliver(self._loop, future, wait))
        return future

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Work on the stream for copying in; the computing stream waits for its end."""
        torch.cuda.set_stream(self._copy_in)
        try:
            yield
        finally:
            torch.cuda.set_stream(self.compute)
            self.compute.wait_event(self._copy_in.record_event())

    def send(self, array: NDArray[np.int32], into: Tensor | None = None) -> Tensor:
        """Copy through pinned memory."""
        pinned = self._pinned(array.size, torch.int32).view(array.shape)
        pinned.numpy()[:] = array
        if into is None:
            return pinned.to(self._device, non_blocking=True)
        return into.copy_(pinned, non_blocking=True)

    def download(self, tensors: Sequence[Tensor]) -> Callable[[], HostArrays]:
        """Copy to pinned memory; small one-dimensional arrays are valid while the closure of the result runs."""
        copies = [self._pinned(t.numel(), t.dtype).view(t.shape).copy_(t, non_blocking=True) for t in tensors]
        return lambda: tuple(copy.numpy() for copy in copies)

    @contextmanager
    def span(self, phase: str) -> Iterator[None]:
        """A range named "stage phase", by NVTX for the tools of the driver, and for `torch.profiler`."""
        name = f"{self._stage} {phase}"
        torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]
        try:
            with torch.profiler.record_function(name):
                yield
        finally:
            torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]

    async def stop(self) -> None:
        """Let the thread see all results and end."""
        self._queue.put(None)
        await self._loop.run_in_executor(None, self._thread.join)

    def _pinned(self, count: int, dtype: torch.dtype) -> Tensor:
        """Pinned memory for `count` values; what is small returns to its pool when the work has been read."""
        size = count * dtype.itemsize
        if size > SMALL:
            return torch.empty(count, dtype=dtype, pin_memory=True)
        buffer = self._buffers.pop() if self._buffers else torch.empty(SMALL, dtype=torch.uint8, pin_memory=True)
        self._borrowed.append(buffer)
        return buffer[:size].view(dtype)

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            job()
