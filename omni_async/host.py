"""The engine's own thread and event loop."""

import asyncio
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from omni_async.bridge import Latch


def _new_event_loop() -> asyncio.AbstractEventLoop:
    if sys.platform == "win32":  # uvloop is not made for it; asyncio's own loop serves as well, a little slower
        return asyncio.new_event_loop()
    import uvloop

    return uvloop.new_event_loop()


class Host:
    """Runs one coroutine on a thread and a loop that callers share with nobody.

    No signal handler is installed: asyncio's runner does that on the main thread only.
    """

    def __init__(self, main: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        self._main = main
        self._name = name
        self._ended = Latch()

    def start(self) -> None:
        """Make the loop and start the thread; what fails here fails for the caller, who else would wait in vain."""
        loop = _new_event_loop()
        self._thread = threading.Thread(target=self._run, args=(loop,), name=self._name, daemon=True)
        self._thread.start()

    async def join(self) -> None:
        """Return when the coroutine and its thread have ended."""
        await self._ended.wait()
        self._thread.join()

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                runner.run(self._main())
        finally:
            self._ended.set()
