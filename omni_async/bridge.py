"""Signals from the engine's thread to callers' event loops: asyncio's, uvloop's and trio's."""

import asyncio
import threading
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

import anyio

from omni_async.errors import EngineStateError


class Post(Protocol):
    """Runs a callable on one event loop soon; may be called on any thread."""

    def __call__(self, callback: Callable[..., object], /, *args: object) -> object:
        """Raises RuntimeError (asyncio) or trio's RunFinishedError if the loop is gone."""
        ...


class Waiter(NamedTuple):
    """A task that waits on some event loop."""

    loop: object
    """The loop's identity."""
    post: Post
    event: anyio.Event

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
        return cls(loop, loop.call_soon_threadsafe, anyio.Event())

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
        return cls(token, token.run_sync_soon, anyio.Event())


def _set_all(events: list[anyio.Event]) -> None:
    for event in events:
        event.set()


def wake(waiters: Iterable[Waiter]) -> set[object]:
    """Wake waiting tasks with one hand-over per event loop; returns the loops that are gone."""
    by_loop: dict[object, tuple[Post, list[anyio.Event]]] = {}
    for waiter in waiters:
        entry = by_loop.get(waiter.loop)
        if entry is None:
            by_loop[waiter.loop] = (waiter.post, [waiter.event])
        else:
            entry[1].append(waiter.event)
    gone: set[object] = set()
    for loop, (post, events) in by_loop.items():
        try:
            post(_set_all, events)
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
        await waiter.event.wait()
