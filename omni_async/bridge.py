"""Signals from the engine's thread to callers' event loops: asyncio's, uvloop's and trio's."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol

from omni_async.errors import EngineStateError


class Post(Protocol):
    """Runs a callable on one event loop soon; may be called on any thread."""

    def __call__(self, callback: Callable[..., object], /, *args: object) -> object:
        """Raises RuntimeError (asyncio) or trio's RunFinishedError if the loop is gone."""
        ...


class Waiter(Protocol):
    """A task that waits on some event loop."""

    @property
    def loop(self) -> object:
        """The loop's identity."""
        ...

    @property
    def post(self) -> Post:
        """How to reach the loop."""
        ...

    def set(self) -> None:
        """End the waiting; on the loop."""
        ...

    def wait(self) -> Awaitable[None]:
        """Wait for `set`."""
        ...


class AsyncioWaiter:
    """A waiter on asyncio or uvloop: a bare future is the quickest, and one is made for every event that is read."""

    __slots__ = ("_future", "loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._future: asyncio.Future[None] = loop.create_future()

    @property
    def post(self) -> Post:
        """See `Waiter`."""
        return self.loop.call_soon_threadsafe

    def set(self) -> None:
        """See `Waiter`."""
        if not self._future.done():
            self._future.set_result(None)

    def wait(self) -> Awaitable[None]:
        """See `Waiter`."""
        return self._future


class TrioWaiter:
    """A waiter on trio."""

    __slots__ = ("_token", "set", "wait")

    def __init__(self) -> None:
        try:
            import trio  # optional: only callers that run under it have it
        except ImportError:
            raise EngineStateError("no running event loop: call this from a coroutine") from None
        try:
            self._token = trio.lowlevel.current_trio_token()
        except RuntimeError:
            raise EngineStateError("no running event loop: call this from a coroutine") from None
        event = trio.Event()
        self.set: Callable[[], None] = event.set
        self.wait: Callable[[], Awaitable[None]] = event.wait

    @property
    def loop(self) -> object:
        """See `Waiter`."""
        return self._token

    @property
    def post(self) -> Post:
        """See `Waiter`."""
        return self._token.run_sync_soon


def wait_here() -> Waiter:
    """A waiter on the running event loop.

    Raises:
        EngineStateError: no event loop of a supported kind is running on this thread.
    """
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return TrioWaiter()
    return AsyncioWaiter(loop)


def _set_all(waiters: list[Waiter]) -> None:
    for waiter in waiters:
        waiter.set()


def wake(waiters: Iterable[Waiter]) -> set[object]:
    """Wake waiting tasks with one hand-over per event loop; returns the loops that are gone."""
    by_loop: dict[object, list[Waiter]] = {}
    for waiter in waiters:
        by_loop.setdefault(waiter.loop, []).append(waiter)
    gone: set[object] = set()
    for loop, together in by_loop.items():
        try:
            together[0].post(_set_all, together)
        except RuntimeError:  # "Event loop is closed"; trio.RunFinishedError is a RuntimeError too
            gone.add(loop)
    return gone


class Latch:
    """A one-way switch that any thread may set and any event loop may await."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiters: list[Waiter] = []
        self._is_set = False

    def set(self) -> None:
        """Let everybody pass."""
        with self._lock:
            self._is_set = True
            waiters, self._waiters = self._waiters, []
        wake(waiters)

    async def wait(self) -> None:
        """Return once the latch is set."""
        waiter = wait_here()
        with self._lock:
            if self._is_set:
                return
            self._waiters.append(waiter)
        await waiter.wait()
