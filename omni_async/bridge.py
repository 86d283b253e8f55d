"""Signals from the engine's thread to callers' event loops: asyncio's, uvloop's and trio's."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import NamedTuple, Protocol

from omni_async.errors import EngineStateError


class Post(Protocol):
    """Runs a callable on one event loop soon; may be called on any thread."""

    def __call__(self, callback: Callable[..., object], /, *args: object) -> object:
        """Raises RuntimeError (asyncio) or trio's RunFinishedError if the loop is gone."""
        ...


class Waiter(NamedTuple):
    """A task that waits on some event loop, for a future or an event of that loop's own kind: the quickest way."""

    loop: object
    """The loop's identity."""
    post: Post
    set: Callable[[], None]
    """Ends the waiting; on the loop."""
    wait: Callable[[], Awaitable[None]]

    @classmethod
    def here(cls) -> "Waiter":
        """A waiter on the running event loop.

        Raises:
            EngineStateError: no event loop of a supported kind is running on this thread.
        """
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return cls._on_trio()
        future: asyncio.Future[None] = loop.create_future()
        return cls(loop, loop.call_soon_threadsafe, partial(_resolve, future), partial(_pass, future))

    @classmethod
    def _on_trio(cls) -> "Waiter":
        try:
            import trio  # optional: only callers that run under it have it
        except ImportError:
            raise EngineStateError("no running event loop: call this from a coroutine") from None
        try:
            token = trio.lowlevel.current_trio_token()
        except RuntimeError:
            raise EngineStateError("no running event loop: call this from a coroutine") from None
        event = trio.Event()
        return cls(token, token.run_sync_soon, event.set, event.wait)


def _resolve(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


def _pass(future: "asyncio.Future[None]") -> "asyncio.Future[None]":
    return future


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
        waiter = Waiter.here()
        with self._lock:
            if self._is_set:
                return
            self._waiters.append(waiter)
        await waiter.wait()
